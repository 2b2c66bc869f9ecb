"""Denoisers: what is hidden from the encoder and asked from the decoder, and the mixtures that have a name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fat5.errors import ConfigError, nearest


@dataclass(frozen=True)
class Denoiser:
    """One way to turn a window of text into an input and a target.

    Span corruption (T5, arXiv:1910.10683) hides `round(length * noise_density)` tokens in random spans; with
    `mean_noise_span_length` null one span at the end is hidden (prefix language modelling). `fat5.data.spans` states
    the formulas and the rounding.

    Attributes:
        noise_density: Share of the tokens that the decoder must produce, between 0 and 1.
        mean_noise_span_length: Mean number of tokens of a hidden span, at least 1; null hides one span, at the end.
        prefix: Token of the tokenizer that opens the input and names the task, such as "[R]"; null for none.
        weight: Relative frequency in the mixture; weights need not sum to 1.
        use_sentinels: Mark hidden spans by <extra_id_i> on both sides. Only a single span at the end can do without.
        name: Name in reports, unique in a mixture; empty for one made of the settings, such as "R-mu3-r0.15".
    """

    noise_density: float = 0.15
    mean_noise_span_length: float | None = 3.0
    prefix: str | None = None
    weight: float = 1.0
    use_sentinels: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        where = f"denoiser {self.name!r}"
        if not 0.0 < self.noise_density < 1.0:
            raise ConfigError(f"{where}: noise_density must lie strictly between 0 and 1, got {self.noise_density}")
        if self.mean_noise_span_length is not None and not 1.0 <= self.mean_noise_span_length < float("inf"):
            raise ConfigError(f"{where}: mean_noise_span_length must be 1 or more, got {self.mean_noise_span_length}")
        if not 0.0 < self.weight < float("inf"):
            raise ConfigError(f"{where}: weight must be positive, got {self.weight}; drop the denoiser instead")
        if not self.use_sentinels and self.mean_noise_span_length is not None:
            raise ConfigError(
                f"{where}: use_sentinels=false needs mean_noise_span_length=null (one span at the end); "
                f"without sentinels nothing says where the spans of mean length {self.mean_noise_span_length:g} were"
            )

    @property
    def shortest_input(self) -> int:
        """Tokens of the shortest input: the prefix, one clean token, a sentinel and EOS."""
        return (self.prefix is not None) + 1 + self.use_sentinels + 1

    @property
    def shortest_target(self) -> int:
        """Tokens of the shortest target: a sentinel, one hidden token and EOS."""
        return self.use_sentinels + 1 + 1

    def _default_name(self) -> str:
        if self.mean_noise_span_length is None:
            return f"{(self.prefix or 'prefix').strip('[]')}-r{self.noise_density:g}"
        return f"{(self.prefix or 'span').strip('[]')}-mu{self.mean_noise_span_length:g}-r{self.noise_density:g}"


PRESETS: dict[str, tuple[Denoiser, ...]] = {
    "fat5": (
        Denoiser(0.15, 3.0, "[R]", 0.165),
        Denoiser(0.15, 8.0, "[R]", 0.165),
        Denoiser(0.75, None, "[S]", 0.34),
        Denoiser(0.5, 3.0, "[X]", 0.0825),
        Denoiser(0.15, 8.0, "[X]", 0.0825),
        Denoiser(0.15, 64.0, "[X]", 0.0825),
        Denoiser(0.5, 64.0, "[X]", 0.0825),
    ),
    "ul2": (
        Denoiser(0.15, 3.0, "[R]"),
        Denoiser(0.15, 8.0, "[R]"),
        Denoiser(0.25, None, "[S]"),
        Denoiser(0.5, 3.0, "[X]"),
        Denoiser(0.5, 8.0, "[X]"),
        Denoiser(0.15, 64.0, "[X]"),
        Denoiser(0.5, 64.0, "[X]"),
    ),
    "t5": (Denoiser(0.15, 3.0),),
    "prefix-lm": (Denoiser(0.5, None, use_sentinels=False),),
}
"""Named mixtures. `fat5`: its [S] keeps a quarter of the text as input. `ul2`: table 1 of UL2 (arXiv:2205.05131), in
equal parts. `t5`: plain span corruption, no prefix token. `prefix-lm`: the second half of the text given the first."""


def resolve_denoisers(denoisers: str | list[Denoiser] | tuple[Denoiser, ...]) -> tuple[Denoiser, ...]:
    """Return the mixture of that name, or the given one after a check that it has members and their names are unique.

    Raises:
        ConfigError: An unknown preset (the message names the nearest), an empty list, or two denoisers of one name.
    """
    if isinstance(denoisers, str):
        if denoisers not in PRESETS:
            known = ", ".join(PRESETS)
            raise ConfigError(f"unknown denoisers {denoisers!r}{nearest(denoisers, PRESETS)} (presets: {known})")
        return PRESETS[denoisers]
    mixture = tuple(denoisers)
    if not mixture:
        raise ConfigError(f"denoisers is an empty list; give at least one, or a preset: {', '.join(PRESETS)}")
    for name, count in Counter(denoiser.name for denoiser in mixture).items():
        if count > 1:
            raise ConfigError(f"{count} denoisers are named {name!r}; names must be unique, since reports go by them")
    return mixture
