"""The kinds of media, and what each is called wherever it has a name.

A new kind that is decoded into one array is a row here, and the module of its decoder. Leans on
`managers.schedule_batch.Modality`, on the fields of `managers.io_struct.GenerateReqInput`, and
on names in SGLang's processors and models.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

IMAGE, VIDEO, AUDIO = "IMAGE", "VIDEO", "AUDIO"


class Modality(NamedTuple):
    """One kind of media.

    Attributes:
        name: on the wire, and of SGLang's member.
        grids: the argument of SGLang's processors that has the grids of a prompt's items.
        placeholder: the attribute of SGLang's processors that has the placeholder's token id.
        start_patches: the cost of an item as long as none was encoded.
        lengths: whether a grid is one length, and all grids are one flat list. Only items of
            one length share a forward pass.
        decoder: the module that makes an array of an item, in a child (`decode`), and says
            what that takes (`CPU_S`, `needed_bytes`), as `decoding.sound` does; empty for
            pictures and videos, which the child knows.
    """

    name: str
    grids: str
    placeholder: str
    start_patches: float
    lengths: bool = False
    decoder: str = ""

    @property
    def request_field(self) -> str:
        return f"{self.name.lower()}_data"

    @property
    def feature_method(self) -> str:
        """Of SGLang's models: runs the tower."""
        return f"get_{self.name.lower()}_feature"

    @property
    def item_grid(self) -> str:
        """What one of SGLang's items calls its own grid."""
        return f"{self.name.lower()}_grid_thw"

    @property
    def decoding(self) -> Any:
        """The module that `decoder` names."""
        return import_module(self.decoder)

    @property
    def sglang(self) -> Any:
        from sglang.srt.managers import schedule_batch

        return schedule_batch.Modality[self.name]


# In the order in which SGLang's processors consume a request's items. The costs are those
# of a picture of 448 x 448, some seconds of video, and half a minute of sound.
MODALITIES = {
    row.name: row
    for row in (
        Modality(IMAGE, "img_grid_thw", "IM_TOKEN_ID", 1024.0),
        Modality(VIDEO, "video_grid_thw", "VIDEO_TOKEN_ID", 16_384.0),
        Modality(
            AUDIO,
            "audio_feature_lens",
            "audio_token_id",
            3000.0,
            lengths=True,
            decoder="sglang_epd.decoding.sound",
        ),
    )
}
