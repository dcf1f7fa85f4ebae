"""What the server of `tests.support.processes` imports first: the classes that are entered once a task is imported."""

from lit_effattn import LanguageModel, registry  # noqa: F401 (an import is what is tested)

CLASSES = {kind.__name__ for kind in registry.classes()}
