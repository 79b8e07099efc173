# Fine-tuning on NVIDIA GPUs: docker build -t flow-grpo . && docker run --gpus all -v "$PWD/runs:/home/user/runs" flow-grpo train sd35_medium_ocr
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build==1.3.0 && python -m build --wheel

FROM python:3.12-slim
# OpenCV, with which OCR and the rewards of shapes read images, needs these libraries
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgl1=1.* libglib2.0-0=2.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/dist/ /tmp/dist/
# the registry's torch brings its CUDA libraries
RUN pip install --no-cache-dir "$(echo /tmp/dist/*.whl)[gpu]"
RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user
ENTRYPOINT ["flow-grpo"]
CMD ["--help"]
