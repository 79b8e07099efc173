"""Prompts as people have them: lists, objects by id, other column names, folders, and objects in memory. And what is refused."""

import contextlib
import datetime
import json
import os

import datasets
import httpx
import pandas
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flow_grpo import ImagePrompt, PromptSet
from flow_grpo.cli.options import read_prompt_source
from flow_grpo.cli.sample import _read_prompts
from flow_grpo.config.sections import FROM_PYTHON
from flow_grpo.data import prompt_sources
from flow_grpo.data.prompt_sources import load_prompts, load_run_prompts, syntax_warnings
from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import images_of

TWO = ["a red fox", 'a sign "OK"']


def given(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return load_prompts(folder / name)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_has_a_prompt_for_each_string(tmp_path, indent):
    """As HPSv2's benchmark."""
    read = given(tmp_path, "anime.json", json.dumps(TWO, indent=indent))
    assert (read.prompts, read.metadata) == (TWO, [{}, {}])


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_object_has_prompts_by_id(tmp_path, indent):
    """As MJHQ-30K, and GenAI-Bench, whose rows have an id of their own."""
    by_id = {f"{n:04x}": {"category": "animals", "prompt": text} for n, text in enumerate(TWO)}
    read = given(tmp_path, "meta_data.json", json.dumps(by_id, indent=indent))
    assert read.prompts == TWO
    assert read.metadata == [{"id": "0000", "category": "animals"}, {"id": "0001", "category": "animals"}]
    assert given(tmp_path, "own.json", {"0": {"id": 7, "prompt": "a"}}).metadata == [{"id": 7}]
    assert given(tmp_path, "texts.json", dict(zip("ab", TWO, strict=True))).prompts == TWO


def test_a_single_object_is_one_row_and_lines_of_objects_several(tmp_path):
    assert given(tmp_path, "one.json", json.dumps({"prompt": "a", "n": 1}, indent=2)).metadata == [{"n": 1}]
    assert given(tmp_path, "lines.json", '{"prompt": "a"}\n{"prompt": "b"}\n').prompts == ["a", "b"]
    assert given(tmp_path, "lines.jsonl", '"a"\n"b"\n').prompts == ["a", "b"]


@pytest.mark.parametrize("column", ["caption", "Text", "prompt_en", "description"])
def test_another_column_is_taken_if_it_alone_fits_and_the_reading_says_so(tmp_path, column):
    read = given(tmp_path, "p.csv", f"{column},n\n42,1\nnull,2\n")
    assert (read.prompts, read.metadata) == (["42", "null"], [{"n": 1}, {"n": 2}])
    assert read.notes == (f"{tmp_path / 'p.csv'}: the column `{column}` is taken as the prompt.",)
    assert given(tmp_path, "q.csv", f"{column},prompt\na,b\n").prompts == ["b"]
    assert given(tmp_path, "q.csv", f"{column},prompt\na,b\n").notes == ()


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_csv_may_be_separated_by_semicolons_or_tabs(tmp_path, mark):
    read = given(tmp_path, "p.csv", f'"prompt"{mark}"n"\n"a, b; c"{mark}1\nd{mark}\n')
    assert (read.prompts, read.metadata) == (["a, b; c", "d"], [{"n": 1}, {"n": None}])
    assert given(tmp_path, "commas.csv", "n,prompt\n1,a; b\n").prompts == ["a; b"]


def test_a_parquet_table_of_captions_keeps_dates_and_bytes(tmp_path):
    """As Pick-a-Pic."""
    day = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    columns = {"caption": TWO, "created_at": [day] * 2, "jpg_0": [b"1", b"2"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    read = load_prompts(tmp_path / "p.parquet")
    assert read.prompts == TWO
    assert read.metadata[0]["created_at"].year == 2026
    assert read.metadata[1]["jpg_0"] == b"2"


@pytest.fixture
def texts(tmp_path):
    """A folder as DPG-Bench has it, with files of macOS and an editor."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name in ("10.txt", "2.TXT", "1.txt", "whoops3.txt"):
        (folder / name).write_text(f"a dense description, {name}\n\n")
    (folder / "._1.txt").write_bytes(b"\0\x05\x16\x07")
    (folder / ".DS_Store").write_bytes(b"\0")
    (folder / "LICENSE").write_text("")
    return folder


def test_a_folder_of_texts_is_a_prompt_set_for_sample_train_and_eval(texts):
    names = ["1.txt", "2.TXT", "10.txt", "whoops3.txt"]
    read = load_prompts(texts)
    assert read.prompts == [f"a dense description, {name}" for name in names]
    assert read.metadata == [{"file_name": name} for name in names]
    assert _read_prompts([f"{texts}/"]).prompts == read.prompts
    assert load_run_prompts(str(texts)) == read == read_prompt_source(str(texts), None)


def test_captions_of_kohyas_scripts_are_prompts_where_there_is_no_text(tmp_path):
    for name in ("b.caption", "a.caption", "a.png"):
        (tmp_path / name).write_text(f"of {name}")
    read = load_prompts(tmp_path)
    assert read.prompts == ["of a.caption", "of b.caption"]
    (tmp_path / "a.txt").write_text("text")
    assert load_prompts(tmp_path).prompts == ["text"]


def test_sample_takes_no_file_or_folder_for_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").write_text("a")
    for word, sentence in {
        "empty": "is a folder without prompts",
        "empty/": "is a folder without prompts",
        "missing/": "is not a prompt file",
        "missing.csv": "there is no file",
        "notes": r"notes is not a \.txt",
        ".": "is a folder without prompts",
    }.items():
        with pytest.raises(FlowGRPOError, match=sentence):
            _read_prompts([word])
    assert _read_prompts(["cat"]).prompts == ["cat"]
    assert _read_prompts(["x" * 5000]).prompts == ["x" * 5000]


def test_a_folder_of_captioned_images_gives_texts_and_one_of_prompts_images_to_edit(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\n0.png,"a sign ""OK"""\n')
    captions = load_prompts(tmp_path)
    assert (captions.prompts, captions.metadata) == (['a sign "OK"'], [{"file_name": "0.png"}])
    assert images_of(captions.prompts[0]) == ()
    assert captions.notes[0].endswith("the column `text` is taken as the prompt, without the images that it describes.")
    assert _read_prompts([str(tmp_path)]).prompts == captions.prompts
    (tmp_path / "metadata.csv").write_text("file_name,prompt\n0.png,make it night\n")
    assert len(images_of(load_prompts(tmp_path).prompts[0])) == 1


# -- paths that a stranger wrote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
@pytest.mark.parametrize("whole", [True, False], ids=["folder", "file"])
def test_a_table_of_a_folder_names_images_inside_it_alone(tmp_path, name, whole):
    folder = tmp_path / "set"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    Image.new("RGB", (4, 4)).save(folder / "own.png")
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    column = "file_name" if whole else "image"

    def read(path):
        row = (
            f'{{"{column}": {json.dumps(path)}, "prompt": "a"}}'
            if name.endswith("jsonl")
            else f"{column},prompt\n{path},a\n"
        )
        (folder / name).write_text(row)
        return load_prompts(folder if whole else folder / name)

    assert len(images_of(read("own.png").prompts[0])) == 1
    for path in ("../private.png", str(tmp_path / "private.png"), "link.png"):
        with pytest.raises(FlowGRPOError, match="outside its folder"):
            read(path)


def test_a_file_at_an_address_names_no_local_image(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    rows = {
        "/p.jsonl": {"prompt": "a", "image": str(tmp_path / "private.png")},
        "/q.jsonl": {"prompt": "a", "image": "p.png"},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=json.dumps(rows[request.url.path])))
    monkeypatch.setattr(httpx, "get", httpx.Client(transport=transport).get)
    for address in rows:
        with pytest.raises(FlowGRPOError, match="has no folder to be found in"):
            load_prompts(f"https://example.org{address}")


def test_a_data_set_of_the_hub_names_images_of_the_hubs_cache_alone(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    for file in (cache / "a.png", tmp_path / "private.png"):
        Image.new("RGB", (4, 4)).save(file)
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(cache))
    monkeypatch.setattr(prompt_sources, "downloads", contextlib.nullcontext)

    def read(path):
        data_set = datasets.Dataset.from_dict({"prompt": ["a"], "image": [{"bytes": None, "path": str(path)}]})
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data_set)
        return load_prompts("someone/pictures")

    assert len(images_of(read(cache / "a.png").prompts[0])) == 1
    with pytest.raises(FlowGRPOError, match="outside its folder"):
        read(tmp_path / "private.png")


def test_devices_pipes_and_huge_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "huge.csv").touch()
    os.truncate(tmp_path / "huge.csv", 1 << 40)  # takes no space
    for name in ("pipe.jsonl", "zero.txt"):
        with pytest.raises(FlowGRPOError, match=f"{name} is not a regular file"):
            load_prompts(tmp_path / name)
    with pytest.raises(FlowGRPOError, match=r"huge.csv has 1,048,576 MB; at most 1,024 MB are read"):
        load_prompts(tmp_path / "huge.csv")
    for device in ("/dev/zero", "/dev/random"):
        with pytest.raises(FlowGRPOError, match="is not a"):
            load_prompts(device)
    folder = tmp_path / "texts"
    folder.mkdir()
    os.mkfifo(folder / "0.txt")
    with pytest.raises(FlowGRPOError, match=r"0\.txt is not a regular file"):
        load_prompts(folder)


# -- in memory ---------------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        tuple(ROWS),
        (dict(row) for row in ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pandas.DataFrame(ROWS),
        PromptSet(["a", "b"], [{"n": 1}, {"n": 2}]),
    ],
    ids=["list", "tuple", "generator", "Dataset", "IterableDataset", "pandas", "PromptSet"],
)
def test_rows_in_memory_are_prompts_with_metadata(source):
    assert load_run_prompts(source) == PromptSet(["a", "b"], [{"n": 1}, {"n": 2}])


@pytest.mark.parametrize("source", [["a", "b"], ("a", "b"), (text for text in "ab"), {"a": 0, "b": 0}.keys()])
def test_texts_in_memory_are_prompts(source):
    assert load_run_prompts(source) == PromptSet(["a", "b"], [{}, {}])


def test_a_data_set_with_images_gives_prompts_with_images_or_captions():
    image = Image.new("RGB", (4, 4))
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    edits = load_prompts(datasets.Dataset.from_dict({"prompt": ["a"], "image": [image]}, features=features))
    assert edits.prompts == [ImagePrompt("a", [image])]
    captions = load_prompts([{"text": "a", "image": image}])
    assert (captions.prompts, captions.metadata) == (["a"], [{}])
    assert "the column `text` is taken as the prompt, without the images" in captions.notes[0]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
            "were given as DatasetDict: give .* one split",
        ),
        ({"prompt": ["a"]}, "were given as dict: give a file"),
        (5, "were given as int: give a file, a list of texts"),
        ([], "holds no prompts"),
        ((text for text in ()), "holds no prompts"),
        (["a", 5], "item 2: 5: give all as texts"),
        ([5, "a"], "item 1: 5: give all as texts"),
        (["a", {"prompt": "b"}], "item 2: {'prompt': 'b'}: give all as texts"),
        (["a", " "], "item 2: ' ' is not a prompt"),
        ([{"n": 1}], "no column `prompt`; it has n"),
        ([{"prompt": [{"role": "user", "content": "a"}]}], "item 1: .* is not a prompt"),
        (FROM_PYTHON, "the prompts of this run were given from Python and are in no file"),
    ],
)
def test_what_is_no_set_of_prompts_is_one_sentence(source, sentence):
    with pytest.raises(FlowGRPOError, match=sentence) as error:
        load_run_prompts(source)
    assert "\n" not in str(error.value)


# -- the syntax of other programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [
        ("# prompt 1", "`#`"),
        ("a sign, best quality --n low quality --w 512", "`--n`"),
        ('--prompt "a sign" --steps 20', "`--prompt`"),
        ("a fox --ar 16:9", "`--ar`"),
        ("a fox <lora:signs:0.8>", "`<lora:signs:0.8>`"),
        ("a (red fox:1.2) in snow", "`(red fox:1.2)`"),
    ],
)
def test_the_syntax_of_other_programs_is_noticed(prompt, mark):
    (sentence,) = syntax_warnings(["a plain prompt", prompt])
    assert sentence.startswith(f"1 of 2 prompts have marks of another program's syntax, such as {mark} in ")


def test_no_packaged_prompt_looks_like_another_programs_syntax():
    plain = ["#1 dad", "a -- b", "co-op -- open", "scores (3:2)", "at 10:30 (noon)", "x < y: z", "(a: b)", "-5 degrees"]
    packaged = [load_prompts(f"prompts/{name}").prompts for name in ("ocr_train.txt", "geneval.jsonl", "signs_eval.txt")]
    assert syntax_warnings([*plain, *(prompt for prompts in packaged for prompt in prompts)]) == []
