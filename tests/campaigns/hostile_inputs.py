"""Gives every verb hostile arguments and damaged files: `python tests/campaigns/hostile_inputs.py --cases 300`.

A case is one command in a folder of its own, with a small run, an export, grids and images, prompts, a config, votes, a preference head
and a copy of the embedded model. Either one of the verb's options or arguments gets a hostile value, or one file is damaged: cut,
emptied, one bit flipped, with other bytes, a link to a private file, a named pipe, a folder, an EPS or a pickle or YAML that run code or,
in JSON and YAML, with another value somewhere. A third of the cases are of the files alone. The command must end by itself, with exit
status 0, 1, 2 or 75, without a traceback, and say something if it failed. One that was given long work, such as training by the defaults of
an empty config, must end at SIGTERM. No code of a file runs, nothing outside of the folder changes, and neither a private file nor a
token of the environment is in what was written.

Prints the cases that broke this, each with the number that repeats it (`--only N`), and the counts by verb; exits with 1 if there were
any. With `--log FILE` the outcomes are appended there, and cases that are in it are not run again.
"""

import argparse
import base64
import collections
import concurrent.futures
import json
import os
import pickle
import random
import re
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import typer
import yaml
from PIL import Image

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from support.cli_process import FORKS, begin
from support.embedded import short_run

from flow_grpo.cli import app as cli
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.policy.hub import BUNDLED_MODELS

MEMORY = 12 << 30  # bytes that a command may take; a value of the user's must not bring a machine down
SECONDS = 300.0  # a command takes less than ten, and more where other work is done
LONG_SECONDS = 60.0  # after which long work is ended by SIGTERM
# may have been given long work, and must end at SIGTERM
LONG = ("train", "compare", "sample", "eval", "doctor", "serve")
WORDS = [
    *[
        "",
        " ",
        "-1",
        "0",
        "1e309",
        "nan",
        "-inf",
        "9" * 20,
        "1.5",
        "true",
        "null",
        "[",
        "{",
        "[]",
        "{}",
        "a: b",
        "é",
        "\u2028",
        "\udcff",
    ],
    *[
        "%s",
        "../../x",
        "/dev/null",
        "/proc/self/mem",
        "/nonexistent/x",
        ".",
        "a" * 5000,
        "--",
        "-",
        "=",
        "=1",
        "x=",
        "[/bold]",
        "\x1b[31m",
    ],
    *[
        "http://127.0.0.1:9",
        "tiny",
        "short.yaml",
        "grid.png",
        "runs/short",
        "model",
        "mine.py",
        "mine.py:brightness",
        "prompts.csv",
    ],
]
VALUES: list[Any] = [
    *[
        None,
        True,
        -1,
        0,
        1e300,
        float("nan"),
        float("inf"),
        10**30,
        "",
        "é",
        "a" * 5000,
        [],
        {},
        [[]],
        {"a": {}},
        [None] * 9,
        "../../x",
    ],
]
SMALL = ["--steps", "1"]
SIGNS = ['red text "CAT" on a blue background', 'white text "DOG" on a green background']
HEAD = "preference_head={weights: head}"
PRELOADED = [
    "flow_grpo.cli.app",
    "flow_grpo.trainer",
    "flow_grpo.compare",
    "flow_grpo.evaluation.measure",
    "flow_grpo.export.export",
    "flow_grpo.doctor.dry_run",
    "flow_grpo.doctor.run",
    "flow_grpo.plan.estimate",
    "flow_grpo.rewards.preference_head",
    "flow_grpo.policy.loading",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "matplotlib.figure",
]
VERBS = {  # what works, in the folder that `world` makes
    "train": ["short.yaml", "output_dir=runs/new"],
    "sample": ["a b", "--seeds", "1", *SMALL, "--out", "out.png"],
    "compare": ["short.yaml", "--seeds", "1", "--budget", "1s", "--out", "compared"],
    "doctor": ["short.yaml"],
    "eval": ["grid.png", "--reward", "color"],
    "score": ["grid.png", "--reward", "color", "--out", "scores.json"],
    "report": ["runs/short"],
    "export": ["runs/short"],
    "plan": ["short.yaml"],
    "init": ["new.yaml"],
    "schema": [],
    "serve": ["color", "--port", "0"],
    "rewards list": [],
    "rewards info": ["color"],
    "rewards test": ["color", "--images", "grid.png"],
    "rewards fit": ["votes/votes.jsonl"],
}
READERS = {  # what reads the files of that folder
    "runs": ["report runs/short", "export runs/short", "export runs/short --merge --out merged", "train short.yaml --resume",
             "sample ab --seeds 1 --steps 1 --lora runs/short", "eval runs/short --steps 1 --limit 1 --trust"],
    "grid.png": ["score grid.png --reward color", "eval grid.png --reward color", "rewards test color --images grid.png"],
    "prompts": ["train short.yaml --dry-run prompts={file}", "score grid.png --reward color --prompts {file}",
                "eval tiny --steps 1 --limit 1 --reward color --prompts {file}"],
    "short.yaml": ["train short.yaml --dry-run", "plan short.yaml", "doctor short.yaml", "train short.yaml output_dir=runs/new"],
    "model": ["sample ab --seeds 1 --steps 1 --model model", "train short.yaml model=model output_dir=runs/new",
              "plan short.yaml model=model",
              "train short.yaml --dry-run model=model"],
    "mine.py": ["score grid.png --reward mine.py:brightness", "rewards info mine.py:brightness"],
    "votes": ["rewards fit votes/votes.jsonl"],
    "runs/short/lora": ["sample ab --seeds 1 --steps 1 --lora runs/short", "export runs/short", "export runs/short --merge --out merged",
                        "sample ab --seeds 1 --steps 1 --lora runs/short/lora"],
    "runs/short/checkpoints": ["train short.yaml --resume steps=3", "export runs/short --checkpoint 1",
                               "sample ab --seeds 1 --steps 1 --lora runs/short/checkpoints/step_000001"],
    "runs/short/metrics": ["report runs/short", "export runs/short", "train short.yaml --resume steps=3"],
    "runs/short/config": ["report runs/short", "export runs/short", "sample ab --seeds 1 --steps 1 --lora runs/short"],
    "runs/short/pictures": ["report runs/short", "export runs/short"],
    "out": ["sample ab --seeds 1 --steps 1 --lora out", "export runs/short --out out"],
    "images": ["score images --reward color", "eval images --reward color", "score images/0.png --reward color --prompt a",
               "rewards test color --images images", "train short.yaml --dry-run prompts=images"],
    "head": ["score grid.png --reward {{head}}", "export runs/short --out head"],
    "cache": ["train short.yaml output_dir=runs/new memory.embedding_cache_dir=cache"],
}  # fmt: skip


def world(folder: Path) -> None:
    """Valid inputs of every kind."""
    config = short_run(
        Path("runs/short"), "model=tiny", "steps=2", "save_every=1", "keep_checkpoints=2", "rewards={color: 1}"
    ).to_yaml()
    (folder / "short.yaml").write_text(config)
    begin("train", "short.yaml", cwd=folder).finish(0, 600)
    cells = [ImageInfo(text, 0, "m") for text in SIGNS]
    save_grid(folder / "grid.png", torch.rand(2, 3, 32, 80), cells, columns=2)
    (folder / "prompts.txt").write_text("\n".join(SIGNS))
    quoted = [text.replace('"', '""') for text in SIGNS]
    (folder / "prompts.csv").write_text(f'prompt,answer\n"{quoted[0]}",1\n"{quoted[1]}",2\n')
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in SIGNS))
    (folder / "mine.py").write_text("def brightness(images, prompts):\n    return images.mean((1, 2, 3))\n")
    votes = folder / "votes" / "pictures"
    votes.mkdir(parents=True)
    pairs = []
    for i in range(8):
        for kind in ("good", "bad"):
            save_grid(votes / f"{kind}{i}.png", torch.rand(1, 3, 16, 16), [ImageInfo("a", i, "m")], columns=1)
        pairs.append({"prompt": f"a {i % 4}", "better": f"pictures/good{i}.png", "worse": f"pictures/bad{i}.png"})
    (folder / "votes" / "votes.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    shutil.copytree(BUNDLED_MODELS["tiny"], folder / "model")
    (folder / "images").mkdir()
    for i in range(3):
        Image.new("RGB", (80, 32), (80 * i, 9, 9)).save(folder / "images" / f"{i}.png")
    rows = [{"file_name": f"{i}.png", "prompt": SIGNS[i % 2]} for i in range(3)]
    (folder / "images" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    begin("export", "runs/short", "--out", "out", cwd=folder).finish(0, 600)
    begin("rewards", "fit", "votes/votes.jsonl", "--out", "head", cwd=folder).finish(0, 600)
    cached = ["output_dir=cached", "steps=1", "memory.embedding_cache_dir=cache"]
    begin("train", "short.yaml", *cached, cwd=folder).finish(0, 600)
    shutil.rmtree(folder / "cached")


def options() -> dict[str, list[Any]]:
    """The parameters of every verb, as typer knows them."""
    values: dict[str, list[Any]] = {}

    def walk(command: Any, name: str) -> None:
        for word, one in getattr(command, "commands", {}).items():
            walk(one, f"{name} {word}".strip())
        if not hasattr(command, "commands"):
            values[name] = command.params

    walk(typer.main.get_command(cli.app), "")
    return values


def keys(content: Any, above: str = "") -> list[str]:
    """All settings of a config, dotted."""
    if not isinstance(content, dict):
        return [above]
    return [above, *(path for key, value in content.items() for path in keys(value, f"{above}.{key}".strip(".")))]


SETTINGS = [key for key in keys(FlowGRPOConfig.from_yaml("tiny_ocr").model_dump()) if key]


def hostile_words(rng: random.Random, verb: str, parameters: list[Any]) -> list[str]:
    """The verb with one hostile option, argument or setting."""
    words = list(VERBS[verb])
    chosen = rng.choice([*parameters, None])
    value = rng.choice(WORDS)
    if chosen is None or "overrides" in chosen.opts:
        given = rng.choice([value, json.dumps(rng.choice(VALUES))])
        if verb in ("train", "doctor", "plan"):
            words.append(f"{rng.choice(SETTINGS)}={given}")
            return [*verb.split(), *words, *(["--dry-run"] if verb == "train" and rng.random() < 0.7 else [])]
        return [*verb.split(), *words, value]
    name = chosen.opts[0]
    if not name.startswith("-"):
        return [*verb.split(), value, *words[1:]]
    if getattr(chosen, "is_flag", False):
        return [*verb.split(), *words, name]
    return [*verb.split(), *words, name, value]


class Canary:
    """Pickled, it runs a command when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ../private/canary",)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 80 32\n%%EndComments\n(%pipe%touch ../private/canary) (w) file closefile\n%%EOF\n"
YAML = b"!!python/object/apply:os.system ['touch ../private/canary']\n"
PYTHON = b"import pathlib\npathlib.Path('../private/canary').touch()\n"


def damage(rng: random.Random, file: Path) -> str:
    """Spoils a file; returns how."""
    content = file.read_bytes()
    ways = ["empty", "cut", "bytes", "flip", "noise", "twice", "utf-16", "deep", "eps", "pickle", "yaml"]
    ways += ["gone", "link", "link to an image", "pipe", "zero", "folder", "circle"]
    if file.suffix in (".json", ".jsonl", ".yaml"):
        ways += ["value"] * 12
    how = rng.choice(ways)
    place = rng.randrange(len(content) + 1)
    if how == "value":
        content = _other_value(rng, file, content.decode())
    flipped = bytearray(content or b"x")
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    spoiled = {
        "empty": b"",
        "cut": content[:place],
        "bytes": content[:place] + rng.randbytes(rng.choice([1, 8, 64])) + content[place + 8 :],
        "flip": bytes(flipped),
        "noise": rng.randbytes(200),
        "twice": content + content,
        "utf-16": content.decode("latin-1").encode("utf-16"),
        "deep": b"[" * 20000,
        "eps": EPS,
        "pickle": pickle.dumps(Canary()),
        "yaml": YAML,
        "value": content,
    }
    links = {
        "link": "private/secret.txt",
        "link to an image": "private/secret.webp",
        "zero": "/dev/zero",
        "circle": file.name,
    }
    file.unlink()
    if how in spoiled:
        file.write_bytes(spoiled[how])
    elif how in links:
        up = "../" * len(file.relative_to(_case_folder(file)).parts)
        file.symlink_to(links[how] if how in ("zero", "circle") else up + links[how])
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    return how


def _case_folder(file: Path) -> Path:
    """The folder `here` of a case."""
    return next(folder for folder in file.parents if folder.name == "here")


def private(place: Path) -> list[bytes]:
    """Make a folder of private files beside that of the case; returns what must not be found in anything that is written."""
    token = f"TOKEN{random.SystemRandom().getrandbits(64):016x}"
    (place / "private").mkdir()
    (place / "private" / "secret.txt").write_text(token)
    Image.effect_noise((40, 40), 90).convert("RGB").save(place / "private" / "secret.webp", lossless=True)
    content = (place / "private" / "secret.webp").read_bytes()
    encoded = [base64.b64encode(content[100 + i : 190 + i]).strip(b"=")[4:-4] for i in range(3)]
    return [token.encode(), content[100:190], *encoded]


def leaked(folder: Path, secrets: list[bytes]) -> str:
    """What is wrong outside of the folder, or in the files that were written in it."""
    names = sorted(path.name for path in (folder.parent / "private").iterdir())
    if "canary" in names:
        return "code of a file was run"
    outside = sorted(path.name for path in folder.parent.iterdir())
    if names != ["secret.txt", "secret.webp"] or outside != ["here", "private"]:
        return f"files outside: {names}, {outside}"
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and any(secret in path.read_bytes() for secret in secrets):
            return f"a private file is in {path.relative_to(folder)}"
    return ""


def _other_value(rng: random.Random, file: Path, text: str) -> bytes:
    """One value of a JSON or YAML text, anywhere in it, becomes another, or is gone."""
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    row = rng.randrange(len(lines))
    read = yaml.safe_load if file.suffix == ".yaml" else json.loads
    content = {"": read(lines[row])}
    places: list[tuple[Any, Any]] = []

    def walk(one: Any) -> None:
        for key in list(one) if isinstance(one, dict) else range(len(one)):
            places.append((one, key))
            if isinstance(one[key], dict | list):
                walk(one[key])

    walk(content)
    holder, key = rng.choice(places)
    if key != "" and rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    value = content[""]
    lines[row] = yaml.safe_dump(value) if file.suffix == ".yaml" else json.dumps(value)
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def case(number: int, seed: int, valid: Path, verbs: dict[str, list[Any]]) -> tuple[list[str], str, str]:
    """One command: its words, what was done to its inputs, and what was wrong with it or ""."""
    rng = random.Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place) / "here"
        shutil.copytree(valid, folder)
        secrets = private(Path(place))
        if rng.random() < 0.3:
            verb = rng.choice(list(verbs))
            words, done = hostile_words(rng, verb, verbs[verb]), ""
        else:
            kind = rng.choice(list(READERS))
            files = sorted(f for f in folder.rglob("*") if f.is_file() and str(f.relative_to(folder)).startswith(kind))
            file = rng.choice(files)
            words = [word.format(file=file.name) for word in rng.choice(READERS[kind]).split()]
            words = [HEAD if word == "{head}" else word for word in words]
            done = f"{file.relative_to(folder)}: {damage(rng, file)}"
        token = secrets[0].decode()
        wrong = run(words, folder, {"HF_TOKEN": token, "REWARD_TOKEN": token, "SECRET": token})
        return words, done, wrong or leaked(folder, secrets)


def logged_case(number: int, seed: int, valid: Path, verbs: dict[str, list[Any]], log: Path | None) -> dict[str, Any]:
    """One command and its outcome, which is appended to the log if there is one."""
    words, done, wrong = case(number, seed, valid, verbs)
    row = {"number": number, "words": words, "done": done, "wrong": wrong}
    if log is not None:
        with log.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    return row


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What was wrong with a command, or ""."""
    command = begin(*words, cwd=folder, environment=environment)
    command.process.join(LONG_SECONDS if words[0] in LONG else SECONDS)
    if command.process.is_alive():
        command.process.terminate()
        command.process.join(SECONDS)
        ended = not command.process.is_alive()
        command.process.kill()
        return "" if words[0] in LONG and ended else f"still ran after {SECONDS:.0f} s: {command.output[-500:]}"
    output, code = command.written.read_bytes().decode("utf-8", "replace"), command.process.exitcode
    command.written.unlink()
    if "Traceback (most recent" in output:
        return f"traceback: {output[-1500:]}"
    if code not in (0, 1, 2, 75):
        return f"exit status {code}: {output[-500:]}"
    if code and not re.search(r"\w", output):
        return f"exit status {code} without a word"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this case alone")
    parser.add_argument(
        "--log", type=Path, help="file of outcomes, from which an earlier campaign of this seed is continued"
    )
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    FORKS.set_forkserver_preload(PRELOADED)
    verbs, counts, broken = options(), collections.Counter[str](), 0
    assert set(verbs) == set(VERBS), "each verb has words that work"
    logged = given.log.read_text().splitlines() if given.log and given.log.exists() else []
    done_before = {row["number"]: row for row in map(json.loads, logged)}
    numbers = range(given.cases) if given.only is None else [given.only]
    with tempfile.TemporaryDirectory() as place, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        valid = Path(place) / "valid"
        valid.mkdir()
        world(valid)

        def outcome(number: int) -> dict[str, Any]:
            return done_before.get(number) or logged_case(number, given.seed, valid, verbs, given.log)

        for row in pool.map(outcome, numbers):
            words = row["words"]
            counts[" ".join(words[: 2 if words[0] == "rewards" else 1])] += 1
            if row["wrong"]:
                broken += 1
                print(f"case {row['number']}: {[word[:80] for word in words]} {row['done']}\n  {row['wrong']}", flush=True)
    print(", ".join(f"{verb} {count}" for verb, count in sorted(counts.items())))
    print(f"{len(numbers)} cases, {broken} broken")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
