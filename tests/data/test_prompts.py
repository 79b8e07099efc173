"""Prompt files: no row is lost whatever a prompt holds, and what can't be read is one sentence with the file and the line."""

import csv
import datetime
import io
import json
from pathlib import Path

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.cli_process import run

from flow_grpo import ImagePrompt, PromptSet
from flow_grpo.data.prompt_sources import load_prompts

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(
    "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\ufeff\t,\"'\\{}[]#; äé猫\U0001f431"
)
ONE_LINE = st.text(LETTERS.filter(lambda c: c not in "\n\r"), min_size=1, max_size=30).map(str.strip).filter(bool)
ANY = st.text(LETTERS | st.sampled_from("\n\r"), min_size=1, max_size=30).filter(lambda text: bool(text.strip()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("prompts")


def written(folder: Path, suffix: str, texts: list[str]) -> Path:
    """Each prompt with its place as metadata, as other programs write it."""
    file, rows = folder / f"p{suffix}", [{"n": i, "prompt": prompt} for i, prompt in enumerate(texts)]
    if suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows))
    elif suffix == ".json":
        text = json.dumps(rows, ensure_ascii=False, indent=1)
    elif suffix == ".csv":
        buffer = io.StringIO(newline="")
        writer = csv.DictWriter(buffer, ["n", "prompt"])
        writer.writeheader()
        writer.writerows(rows)
        text = buffer.getvalue()
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file
    file.write_text(text, encoding="utf-8", newline="")
    return file


@settings(max_examples=60)
@given(texts=st.lists(ONE_LINE, min_size=1, max_size=6), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
def test_every_line_of_a_text_file_is_a_prompt(folder, texts, end, mark):
    (folder / "p.txt").write_bytes((b"\xef\xbb\xbf" if mark else b"") + end.join(texts).encode())
    first = texts[0] if mark else texts[0].removeprefix("\ufeff").strip()  # a mark of its own is not of the prompt
    assert load_prompts(folder / "p.txt").prompts == [p for p in [first, *texts[1:]] if p]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@settings(max_examples=40)
@given(texts=st.lists(ANY, min_size=1, max_size=5))
def test_every_row_of_a_table_is_a_prompt_with_its_metadata(folder, suffix, texts):
    prompts_read = load_prompts(written(folder, suffix, texts))
    assert prompts_read.prompts == texts
    assert prompts_read.metadata == [{"n": i} for i in range(len(texts))]


def test_line_breaks_of_unicode_do_not_split_a_prompt_and_a_byte_order_mark_is_none_of_it(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffone\u2028half\r\ntwo\x85half\n\n three \x0c\x1e half".encode())
    assert load_prompts(tmp_path / "p.txt").prompts == ["one\u2028half", "two\x85half", "three \x0c\x1e half"]
    for name, text in {
        "p.csv": "\ufeffprompt,n\none\u2028half,1\n",
        "p.jsonl": '\ufeff{"prompt": "one\u2028half", "n": 1}\n',
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        prompts_read = load_prompts(tmp_path / name)
        assert (prompts_read.prompts, prompts_read.metadata) == (["one\u2028half"], [{"n": 1}])


def test_a_csv_keeps_quotes_commas_and_line_breaks_and_tells_numbers_from_text(tmp_path):
    (tmp_path / "p.CSV").write_text(
        ' prompt,n,share,code,whole,tag,\n"a ""CAT"", red\nand blue",1,0.5,007,true,x,0\n42,,1e-3,7,False,,\n\nlast,3\n'
    )
    prompts_read = load_prompts(tmp_path / "p.CSV")
    assert prompts_read.prompts == ['a "CAT", red\nand blue', "42", "last"]
    assert prompts_read.metadata == [
        {"n": 1, "share": 0.5, "code": "007", "whole": True, "tag": "x"},
        {"n": None, "share": 0.001, "code": "7", "whole": False, "tag": None},
        {"n": 3, "share": None, "code": None, "whole": None, "tag": None},
    ]


def test_a_csv_keeps_seeds_and_ids_of_any_length_exactly(tmp_path):
    (tmp_path / "p.csv").write_text(f"prompt,seed\na,{2**63 - 2}\nb,-{2**63 - 1}\n")
    assert [row["seed"] for row in load_prompts(tmp_path / "p.csv").metadata] == [2**63 - 2, 1 - 2**63]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_end_as_on_any_system(tmp_path, end):
    files = {
        "p.txt": b"a cat|a dog|",
        "p.csv": b"prompt|a cat|a dog|",
        "p.jsonl": b'{"prompt": "a cat"}|{"prompt": "a dog"}|',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.replace(b"|", end))
        assert load_prompts(tmp_path / name).prompts == ["a cat", "a dog"]


def test_a_prompt_of_a_million_letters_is_one(tmp_path):
    long = "cat, " * 200_000
    for name, text in {"p.csv": f'prompt\n"{long}"\n', "p.txt": long, "p.jsonl": json.dumps({"prompt": long})}.items():
        (tmp_path / name).write_text(text)
        assert [p.strip() for p in load_prompts(tmp_path / name).prompts] == [long.strip()]


PARQUET = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.table({"prompt": [1, 2]}), PARQUET)
EMPTY = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), EMPTY)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        *[(f"p{suffix}", b"", "holds no prompts") for suffix in (".txt", ".jsonl", ".json", ".csv", ".tsv")],
        *[(f"p{suffix}", b"\xef\xbb\xbf\n \n", "holds no prompts") for suffix in (".txt", ".jsonl")],
        ("p.csv", b"prompt,n\n", "holds no prompts"),
        ("p.json", b"[]", "holds no prompts"),
        ("p.parquet", EMPTY.getvalue(), "holds no prompts"),
        ("p.parquet", b"", "could not be read as Parquet"),
        ("p.parquet", b"PAR1 and then nothing", "could not be read as Parquet"),
        ("p.parquet", PARQUET.getvalue(), r"row 1: 1 is not a prompt"),
        *[
            (f"p{suffix}", "é".encode("latin-1"), "line 1 has the byte 0xe9. Save it as UTF-8")
            for suffix in (".txt", ".csv")
        ],
        ("p.txt", "one\ntwo".encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
        ("p.jsonl", '{"prompt": "a"}'.encode("utf-16-be"), "holds zero bytes"),
        ("p.txt", b"\x89PNG\r\n\x1a\n\0\0\0", "is not UTF-8 text: line 1 has the byte 0x89"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": }\n', "line 3 is not valid JSON: Expecting value"),
        ("p.jsonl", b'{"prompt": "a"}\n"b"\n', "line 2: give an object"),
        ("p.jsonl", b'{"prompt": "a", "prompt": "b"}\n', "line 1 is not valid JSON: the key 'prompt' occurs twice"),
        ("p.jsonl", b'{"prompt": ' + b"[" * 20_000, "nested too deeply"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 5}\n', "line 2: 5 is not a prompt"),
        ("p.jsonl", b'{"prompt": "a"}\n{"n": 5}\n', "line 2: None is not a prompt"),
        ("p.jsonl", b'{"prompt": null}\n', "line 1: None is not a prompt"),
        ("p.jsonl", b'{"prompt": ["a", "b"]}\n', "line 1: .* is not a prompt"),
        ("p.jsonl", b'{"prompt": "\\ud800"}\n', "line 1: .* is not a prompt"),
        ("p.jsonl", b'{"prompt": "a", "images": 1}\n', "has a column `images`, a name that is reserved"),
        ("p.json", b'["a", {"prompt": "b"}]', "entry 1: give an object .*; or all texts"),
        ("p.json", b"[1, 2]", "entry 1: give an object"),
        (
            "p.json",
            b'{"info": {"year": 2014}, "annotations": []}',
            "no column `prompt`; it has info, annotations",
        ),
        ("p.json", b'{"0": {"prompt": "a"}, "1": {"n": 2}}', "entry '1': None is not a prompt"),
        ("p.json", b'{"0": {"prompt": "a"},\n "1": }', "line 2 column 7|is not valid JSON"),
        ("p.csv", b"caption,text\na,b\n", "no column `prompt`, but `caption` and `text`: rename"),
        ("p.csv", b"prompt;n\na;1;2\n", "line 2: it has more cells than the 2 column names; put a text with ';' in"),
        ("p.csv", b"prompt,n,n\na,1,2\n", "two columns of one name"),
        ("p.csv", b"prompt\na red fox, a blue bird\n", "line 2: it has more cells than the 1 column names"),
        ("p.csv", b'n,prompt\n1,"a\nb"\n2," "\n', "line 4: ' ' is not a prompt"),
        ("p.csv", b'prompt\n"never closed\n', "not valid CSV"),
        ("p.csv", b"a red fox\n", "no column `prompt`; it has a red fox"),
        ("p.docx", b"x", "is not a .txt"),
        ("p.txt", None, "there is no file"),
    ],
)
def test_a_bad_prompt_file_is_a_clear_error_with_its_name(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as error:
        load_prompts(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_what_is_neither_a_file_nor_a_data_set_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder is a folder without prompts: .*\. Give a prompt file in it"):
        load_prompts(tmp_path / "folder")
    for words in ("a red fox", 'red text "CAT"', "x" * 5000 + " y", "a\0b", ""):
        with pytest.raises(ValueError, match="is not a prompt file, an address or a data set"):
            load_prompts(words)
    blocked = tmp_path / "blocked.txt"
    blocked.write_text("a")
    monkeypatch.setattr(Path, "open", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(ValueError, match=r"blocked\.txt could not be read: Permission denied\."):
        load_prompts(blocked)


def test_a_file_at_an_address_is_read_as_one_on_disk_and_its_copy_where_there_is_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    answers = {
        "/p.txt": httpx.Response(200, content="\ufeffone\u2028half\ntwo\n".encode()),
        "/p.csv": httpx.Response(200, content=b'prompt,n\n"a, b",1\n'),
        "/gone.txt": httpx.Response(404),
    }

    def without_network(request):
        raise httpx.ConnectError("no route to host")

    def server(answer):
        monkeypatch.setattr(httpx, "get", httpx.Client(transport=httpx.MockTransport(answer)).get)

    server(lambda request: answers[request.url.path])
    assert load_prompts("https://example.org/p.txt").prompts == ["one\u2028half", "two"]
    for query in ("", "?download=true", "?raw=1#top"):  # as the hub and other servers write links
        assert load_prompts(f"https://example.org/p.csv{query}").metadata == [{"n": 1}]
    with pytest.raises(ValueError, match=r"gone\.txt could not be read: .*404 Not Found"):
        load_prompts("https://example.org/gone.txt")
    server(without_network)
    assert load_prompts("https://example.org/p.txt").prompts == ["one\u2028half", "two"]
    with pytest.raises(
        ValueError, match=r"new\.txt could not be read: no route to host\. Without a network give a local file"
    ):
        load_prompts("https://example.org/new.txt")


def test_the_command_line_says_what_is_wrong_with_a_prompt_file(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for words in (["sample", "empty.jsonl"], ["train", "tiny_grpo", "prompts=empty.jsonl"]):
        output = run(*words, cwd=tmp_path, code=2)
        assert output.strip() == "error: empty.jsonl holds no prompts."


def test_a_fingerprint_changes_with_prompts_order_metadata_and_images(tmp_path):
    def with_image(color):
        return ImagePrompt("a", [Image.new("RGB", (2, 2), color)])

    day = datetime.date(2026, 1, 2)
    first = PromptSet(["a", "b"], [{"x": 1, "day": day, "raw": b"1", "own": object()}, {}])
    same = PromptSet(["a", "b"], [{"own": object(), "raw": b"1", "day": day, "x": 1}, {}])
    assert first.fingerprint() == same.fingerprint()
    others = [
        PromptSet(["b", "a"], first.metadata),
        PromptSet(["a", "c"], first.metadata),
        PromptSet(["a", "b"], [{**first.metadata[0], "x": 2}, {}]),
        PromptSet(["a", "b"], [{**first.metadata[0], "raw": b"2"}, {}]),
        PromptSet(["a", "b"], [{**first.metadata[0], "day": day.replace(day=3)}, {}]),
        PromptSet([with_image("red"), "b"], first.metadata),
        PromptSet([with_image("blue"), "b"], first.metadata),
    ]
    assert len({prompt_set.fingerprint() for prompt_set in [first, *others]}) == 8
