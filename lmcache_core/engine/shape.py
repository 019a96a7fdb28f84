"""What this engine's frames look like: the header of one it writes, and whether one it reads fits."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.frame import FrameHeader, FrameKind, Segment
from lmcache_core.identity import Part, StorageKey


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Of frames of one part, without codecs: a segment a layer, `[heads, tokens, content]`."""

    part: Part

    def header(self, key: StorageKey, parent: StorageKey | None, first: int, count: int) -> FrameHeader:
        """Of the frame of tokens `[first, first + count)`, its checksums not yet known."""
        segment_nbytes = self.part.segment_nbytes(count)
        return FrameHeader(
            kind=FrameKind.CHUNK,
            key=key,
            parent=parent,
            part=self.part.digest,
            content_format=self.part.content_format,
            first_token=first,
            num_tokens=count,
            segments=(Segment(segment_nbytes, segment_nbytes),) * self.part.num_layers,
        )

    def fits(self, header: FrameHeader, first: int, count: int) -> bool:
        """Whether a verified frame is also the one this engine means: tokens and shape."""
        segment_nbytes = self.part.segment_nbytes(count)
        return (
            (header.first_token, header.num_tokens) == (first, count)
            and header.content_format == self.part.content_format
            and not header.codecs
            and len(header.segments) == self.part.num_layers
            and all(segment.raw_nbytes == segment_nbytes for segment in header.segments)
        )
