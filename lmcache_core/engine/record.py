"""The model's record in the tiers: the root of its chunks, and what explains a miss."""

from __future__ import annotations

from lmcache_core.frame import FrameHeader, FrameKind, Segment
from lmcache_core.identity import ModelRecord
from lmcache_core.tiers import Marks, TierChain


def store_record(chain: TierChain, model: ModelRecord, marks: Marks, deadline: float) -> None:
    """Sees to it that the record is stored, unless there is no memory until `deadline`."""

    def store() -> bool:
        record = model.to_json()
        header = FrameHeader(
            kind=FrameKind.RECORD,
            key=model.key,
            parent=None,
            part="",
            content_format="model json",
            first_token=0,
            num_tokens=0,
            segments=(Segment(len(record), len(record)),),
        )
        frame = chain.allocate(header, deadline)
        if frame is None:
            return False
        with frame:
            frame.segment(0)[:] = record
            return chain.put(frame, marks)

    chain.once(model.key, store)
