"""Settings of the denoising data pipeline."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from fat5.data.denoisers import Denoiser, resolve_denoisers
from fat5.data.spans import check_limits
from fat5.errors import ConfigError, nearest

Layout = Literal["packed", "padded", "concat"]

_LAYOUT_SETTINGS: dict[str, tuple[str, ...]] = {
    "packed": ("encoder_budget", "decoder_budget", "max_documents", "look_ahead"),
    "padded": ("batch_size", "pad_to"),
    "concat": ("batch_size",),
}


@dataclass(frozen=True)
class DenoisingConfig:
    """How documents become batches of noised inputs and targets.

    A window is a stretch of a document that fits both length limits under the denoiser drawn for it; a long document
    is cut into several. Settings of the other layout must stay null.

    Attributes:
        denoisers: A preset (fat5, ul2, t5, prefix-lm) or a list of denoisers.
        layout: "packed": windows side by side in a fixed number of slots, with their boundaries; "padded": one a row;
            "concat": rows cut from the documents end to end, which see each other, as in T5's own preprocessing.
        max_input_length: Most tokens of one input, with its prefix, sentinels and EOS.
        max_target_length: Most tokens of one target, with its sentinels and EOS.
        encoder_budget: Packed: encoder slots of a batch, in tokens; null for 32 x max_input_length.
        decoder_budget: Packed: decoder slots of a batch, in tokens; null to fit the mixture and the documents' lengths.
        max_documents: Packed: most windows of a batch; null for twice the number expected.
        look_ahead: Packed: windows among which the last places of a batch are filled; null for 256, 0 packs in order.
        batch_size: Padded and concat: rows of a batch; null for 32.
        pad_to: Padded: "max_length" for rows of fixed length, "longest" for the batch's longest; null for max_length.
        seed: Seed of every random choice: the order of the documents, the denoisers and the spans.
    """

    denoisers: str | list[Denoiser] = "fat5"
    layout: Layout = "packed"
    max_input_length: int = 1024
    max_target_length: int = 1024
    encoder_budget: int | None = None
    decoder_budget: int | None = None
    max_documents: int | None = None
    look_ahead: int | None = None
    batch_size: int | None = None
    pad_to: Literal["max_length", "longest"] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            known = ", ".join(get_args(Layout))
            raise ConfigError(
                f"layout must be one of {known}, got {self.layout!r}{nearest(self.layout, get_args(Layout))}"
            )
        if self.pad_to not in (None, "max_length", "longest"):
            raise ConfigError(f"pad_to must be max_length or longest, got {self.pad_to!r}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in [0, 2^63), got {self.seed}")
        self._check_layout_settings()
        check_limits(self.mixture, self.max_input_length, self.max_target_length)
        for budget, limit in (("encoder_budget", "max_input_length"), ("decoder_budget", "max_target_length")):
            slots, longest = getattr(self, budget), getattr(self, limit)
            if slots is not None and slots < longest:
                raise ConfigError(
                    f"{budget} = {slots} is smaller than {limit} = {longest}: such a window would fit no batch; "
                    f"raise the one or lower the other"
                )

    @property
    def mixture(self) -> tuple[Denoiser, ...]:
        """The denoisers, a preset's name looked up."""
        return resolve_denoisers(self.denoisers)

    def _check_layout_settings(self) -> None:
        own = _LAYOUT_SETTINGS[self.layout]
        for layout, names in _LAYOUT_SETTINGS.items():
            given = [name for name in names if name not in own and getattr(self, name) is not None]
            if given:
                raise ConfigError(
                    f"{given[0]} belongs to layout {layout!r}, but layout is {self.layout!r}, "
                    f"which takes {', '.join(own)}"
                )
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "look_ahead" else 1
            if isinstance(value, int) and field.name != "seed" and value < least:
                raise ConfigError(f"{field.name} must be {least} or more, got {value}")
