"""`import rewards` and `import rewards.ocr`: other names of flow_grpo.rewards and its modules, so that no module exists twice."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


class _RewardsAlias(MetaPathFinder, Loader):
    """Finds `rewards.X` as flow_grpo.rewards.X, unless `rewards` is somebody else's package."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_ours = name.startswith("rewards.") and sys.modules.get("rewards") is sys.modules["flow_grpo.rewards"]
        return spec_from_loader(name, self) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"flow_grpo.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import has replaced it by the alias


def alias_rewards() -> None:
    """Let the name `rewards` stand for flow_grpo.rewards. Called while `rewards` is imported."""
    sys.modules["rewards"] = import_module("flow_grpo.rewards")
    sys.meta_path.insert(0, _RewardsAlias())
