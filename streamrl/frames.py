"""Messages <-> frames: a msgspec header and raw array buffers. No pickle, no sockets, no messages of its own.

A message is one or two frames. Frame 0 is msgpack: `[schema, kind, [[dtype, length], ...], body]`; frame 1, if there
are arrays, is their bytes end to end, 1-d and little-endian. One frame for all of them, because at the size of a
rollout a frame costs more than its bytes (bench/bench_wire.py). The schema version always comes first, so that a
message of another version is refused with a sentence whatever else changed. `Codec` serves any set of msgspec Structs.

Everything that arrives is untrusted: `unpack` raises `FrameError` (a `WireError`) with a short countable `reason`,
never anything else. Arrays are views of the received frame and therefore read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from streamrl.errors import WireError

SCHEMA_VERSION = 2
MAX_FRAME_BYTES = 64 << 20  # 4M tokens with all they carry; also the socket's own limit
MAX_FRAMES = 2
MAX_ARRAYS = 16
MAX_HEADER_BYTES = 4 << 20

Frame: TypeAlias = bytes | memoryview
Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "|u1")}

MAX_INDEX = 1 << 30

Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)]


class FrameError(WireError):
    """A message that does not follow the format.

    `reason` is the word to count it by: `schema`, `header`, `kind`, `frames`, `array`, `value`, `size`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class _Header(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    kind: str
    arrays: Annotated[tuple[tuple[str, Index], ...], Meta(max_length=MAX_ARRAYS)]
    body: msgspec.Raw


encode = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(_Header)


def pack(message: msgspec.Struct, arrays: Sequence[Array] = ()) -> list[Frame]:
    """A Struct and its 1-d arrays as frames. A single array is not copied: leave it unchanged until it is sent.

    Raises:
        FrameError: reason `size`, if a frame would be longer than a receiver accepts.
    """
    return frames_of(type(message), message, [(array.dtype.str, len(array)) for array in arrays], arrays)


def frames_of(
    kind: type[msgspec.Struct], body: object, specs: Sequence[tuple[str, int]], chunks: Sequence[Array]
) -> list[Frame]:
    """`chunks`, end to end, are the arrays that `specs` announce."""
    header = encode((SCHEMA_VERSION, kind.__name__, specs, msgspec.Raw(encode(body))))
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError("size", f"a header of {len(header)} bytes is above the limit of {MAX_HEADER_BYTES}")
    if not specs:
        return [header]
    buffers = [(c if c.flags.c_contiguous else np.ascontiguousarray(c)).data for c in chunks if len(c)]
    payload: Frame = buffers[0].cast("B") if len(buffers) == 1 else b"".join(buffers)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError("size", f"arrays of {len(payload)} bytes are above the limit of {MAX_FRAME_BYTES}")
    return [header, payload]


class Codec:
    """Unpacks the messages of one channel: the Struct types it knows, and no others.

    Example: Codec(Ack, Cancel).unpack(pack(Cancel(uid="0-000017"))) == (Cancel(uid="0-000017"), []).
    """

    def __init__(self, *types: type[msgspec.Struct]) -> None:
        self._bodies: dict[str, msgspec.msgpack.Decoder[msgspec.Struct]] = {
            t.__name__: msgspec.msgpack.Decoder(t) for t in types
        }

    def unpack(self, frames: Sequence[Frame]) -> tuple[Any, list[Array]]:
        """The message and its arrays, as read-only views of the frames.

        Raises:
            FrameError: whatever the frames hold, this is the only error.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise FrameError("frames", f"{len(frames)} frames, at most {MAX_FRAMES} are allowed")
        if len(frames[0]) > MAX_HEADER_BYTES:
            raise FrameError("size", f"a header of {len(frames[0])} bytes is above the limit of {MAX_HEADER_BYTES}")
        try:
            header = _header_decoder.decode(frames[0])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _refuse_other_schema(_schema_of(frames[0]))
            raise FrameError("header", f"not a header: {error}") from None
        _refuse_other_schema(header.schema)
        decoder = self._bodies.get(header.kind)
        if decoder is None:
            raise FrameError("kind", f"{header.kind[:64]!r} is none of {', '.join(self._bodies)}")
        try:
            message = decoder.decode(header.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("header", f"not a {header.kind}: {error}") from None
        return message, _arrays(header.arrays, frames[1] if len(frames) > 1 else b"")


def _arrays(specs: Sequence[tuple[str, int]], frame: Frame) -> list[Array]:
    arrays: list[Array] = []
    offset = 0
    for name, length in specs:
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise FrameError("array", f"dtype {name[:16]!r} is none of {', '.join(_DTYPES)}")
        end = offset + length * dtype.itemsize
        if end > len(frame):
            raise FrameError("array", f"{length} numbers of {name} announced, {len(frame) - offset} bytes came")
        arrays.append(np.frombuffer(frame, dtype, length, offset))
        offset = end
    if offset != len(frame):
        raise FrameError("array", f"{offset} bytes of arrays announced, {len(frame)} came")
    return arrays


def _schema_of(frame: Frame) -> int | None:
    """The first number of a header whose shape this version does not know."""
    try:
        value = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value[0] if isinstance(value, list) and value and isinstance(value[0], int) else None


def _refuse_other_schema(schema: int | None) -> None:
    if schema is not None and schema != SCHEMA_VERSION:
        raise FrameError(
            "schema",
            f"the message has wire schema {schema}, this process speaks {SCHEMA_VERSION}; "
            "start every process of the run from the same streamrl version",
        )
