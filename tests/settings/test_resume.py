from typing import Any

import pytest

from lit_effattn.settings.resume import check_kept_settings

COSINE = "lit_effattn.tasks.schedules.WarmupCosine"


def settings(path: str, **options: Any) -> dict[str, Any]:
    return {"model": {"init_args": {"lr_scheduler": {"class_path": path, "init_args": options}}}}


@pytest.mark.parametrize("path", [COSINE, "WarmupCosine"])
def test_an_option_that_a_checkpoint_does_not_name_was_at_its_default(path: str):
    """It was saved before there was that option."""
    now = settings(COSINE, total_steps=40, warmup_steps=3, final=0.0, cosine_from_start=False)
    check_kept_settings(settings(path, total_steps=40, warmup_steps=3), now)


@pytest.mark.parametrize(
    "now",
    [
        settings(COSINE, total_steps=40, cosine_from_start=True),
        settings(COSINE, total_steps=41),
        settings("lit_effattn.tasks.schedules.InverseSquareRoot"),
        settings("mine.WarmupCosine", total_steps=40),
    ],
)
def test_another_schedule_is_refused(now: dict[str, Any]):
    with pytest.raises(ValueError, match="resuming keeps the checkpoint's lr_scheduler"):
        check_kept_settings(settings(COSINE, total_steps=40), now)
