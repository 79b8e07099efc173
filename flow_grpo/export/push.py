"""Uploads an export to the Hugging Face hub."""

import glob
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import HFValidationError, disable_progress_bars, validate_repo_id

from flow_grpo.errors import FlowGRPOError
from flow_grpo.export.export import export
from flow_grpo.run_folder import layout
from flow_grpo.text import first_line


def check_push(repo: str) -> None:
    """FlowGRPOError if pushing can't work: the name is not user/name, or there is no token."""
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("no user")
    except HFValidationError as error:
        raise FlowGRPOError(f"{repo!r} is no name for the hub: give --push user/name.") from error
    if get_token() is None:
        raise FlowGRPOError("pushing to the hub needs a token: log in by `hf auth login`, or set HF_TOKEN.")


def push_export(folder: Path, repo: str, private: bool) -> str:
    """Upload an export, creating the repository if needed; returns the address of its page.

    Raises:
        FlowGRPOError: the hub refuses or can't be reached.
    """
    api, content = HfApi(), json.loads((folder / layout.EXPORT_MANIFEST).read_text())
    disable_progress_bars()
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(url.repo_id).private:  # it existed before
            raise FlowGRPOError("the repository is public: make it private on its page, or push to another one.")
        message = f"{content['run']}, step {content['step']}, by flow-grpo {content['flow_grpo']}"
        patterns = {
            "allow_patterns": content["files"],
            "delete_patterns": _files_to_delete(api, url.repo_id, content["files"]),
        }
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message, **patterns)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise FlowGRPOError(
            f"the export is in {folder}, but the hub did not take it as {repo}: {first_line(error)}"
        ) from error
    return str(url)


def export_and_push(run: Path, repo: str, private: bool = False, best: bool = False) -> str:
    """Export a finished run into RUN/export and upload it; returns the page's address.

    Raises:
        FlowGRPOError: the run is not finished, there is no token, or the hub refuses.
    """
    check_push(repo)
    out = run / layout.EXPORT
    export(run, out, best=best, repo=repo)
    return push_export(out, repo, private)


def _files_to_delete(api: HfApi, repo: str, files: list[str]) -> list[str]:
    """Patterns of the files that an earlier export has pushed and this one does not replace, such as a merged model's weights."""
    if not api.file_exists(repo, layout.EXPORT_MANIFEST):
        return []
    with TemporaryDirectory() as folder:
        previous = Path(api.hf_hub_download(repo, layout.EXPORT_MANIFEST, local_dir=folder)).read_text()
    try:
        return [glob.escape(name) for name in json.loads(previous)["files"] if name not in files]
    except (ValueError, KeyError, TypeError):  # a file of that name which no export wrote
        return []
