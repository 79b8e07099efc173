"""Votes on images in the forms that people publish: which of two images of a prompt is the better one."""

from itertools import combinations
from pathlib import Path

from flow_grpo.data.prompt_files import image_source
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.images import Vote

PAIRS = (("chosen", "rejected"), ("better", "worse"))
PICK_A_PIC = ("jpg_0", "jpg_1", "label_0")  # the share of the votes for jpg_0; 0.5 is a tie
IMAGES = ("image", "image_path")  # of a table with a row for each image
NO_COLUMN = ""  # of images to be edited
FORMS = (
    "prompt, chosen and rejected; prompt, better and worse; caption, jpg_0, jpg_1 and label_0 (Pick-a-Pic); or prompt, image "
    "and rank (ImageRewardDB)"
)


def load_votes(source: str, stay_inside: bool = False) -> list[Vote]:
    """Read a table of votes: of pairs, of Pick-a-Pic's labels, without ties, or of ImageRewardDB's ranks, 1 for the best.

    Images are paths relative to the file, or their content. All pairs of different ranks of a prompt are votes.

    Args:
        stay_inside: refuse paths that lead out of the file's folder.

    Raises:
        FlowGRPOError: the file can't be read, has other columns, no vote, or an image that does not exist.
    """
    table = load_prompts(source, image_column=NO_COLUMN)
    votes = []
    for first, better, second, worse in _pairs(table, source):
        good, bad = image_of(table, first, better, source, stay_inside), image_of(table, second, worse, source, stay_inside)
        if good == bad:
            raise FlowGRPOError(f"{source}, row {first + 1}, compares an image with itself: remove it.")
        votes.append(Vote(str(table.prompts[first]), good, bad))
    if not votes:
        raise FlowGRPOError(f"{source} holds no votes: all images are ties.")
    return votes


def _pairs(table: PromptSet, source: str) -> list[tuple[int, str, int, str]]:
    """The row and the column of the better and of the worse image of each vote."""
    rows = table.metadata
    columns = rows[0].keys()
    pair = next((pair for pair in PAIRS if columns >= {*pair}), None)
    if pair is not None:
        return [(i, pair[0], i, pair[1]) for i in range(len(rows))]
    if columns >= {*PICK_A_PIC}:
        labels = [row["label_0"] if row.get("has_label", True) else None for row in rows]
        chosen = {i: label < 0.5 for i, label in enumerate(labels) if label is not None and (label < 0.5 or label > 0.5)}
        return [(i, f"jpg_{int(second)}", i, f"jpg_{int(not second)}") for i, second in chosen.items()]
    image = next((name for name in IMAGES if name in columns), None)
    if image is None or "rank" not in columns:
        raise FlowGRPOError(f"{source} has no votes in a form that is known: give the columns {FORMS}.")
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(str(row.get("prompt_id") or table.prompts[i]), []).append(i)
    order = [sorted(of_prompt, key=lambda i: rows[i]["rank"]) for of_prompt in members.values()]
    return [
        (a, image, b, image) for ranked in order for a, b in combinations(ranked, 2) if rows[a]["rank"] < rows[b]["rank"]
    ]


def image_of(table: PromptSet, row: int, column: str, source: str, stay_inside: bool = False) -> Path | bytes:
    """The path or the content of an image of a table that was read from `source`. FlowGRPOError if there is none."""
    where = f"{source}, row {row + 1}"
    path = image_source(table.metadata[row][column], Path(source).parent, where, column, stay_inside)
    if isinstance(path, bytes):
        return path
    if not path.is_file():
        raise FlowGRPOError(f"{where}: the image {path} does not exist.")
    return path
