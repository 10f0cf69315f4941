"""Messages as no peer of ours sends them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from streamrl import wire


def mutated(frames: Sequence[wire.Frame], rng: random.Random) -> list[wire.Frame]:
    """One to three of: a flipped bit, a truncation, a huge length, a frame too many or too few, twice the data, data of
    another width, another dtype in the header, frames exchanged."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        i = 0 if rng.random() < 0.6 else rng.randrange(len(frames))
        frame = bytearray(frames[i])
        match rng.randrange(9):
            case 0 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1:
                frame = frame[: rng.randrange(len(frame) + 1)]
            case 2:
                at = rng.randrange(len(frame) + 1)
                frame[at:at] = rng.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xcb\x7f\xf8" + b"\0" * 6]
                )
            case 3:
                frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(40)))
                continue
            case 4 if len(frames) > 1:
                del frames[rng.randrange(len(frames))]
                break
            case 5:
                frame = frame * 2
            case 6:
                frame = bytearray(np.frombuffer(bytes(frame[: len(frame) // 4 * 4]), "<i4").astype("<i8").tobytes())
            case 7:
                frame = frame.replace(b"<i4", rng.choice([b"<f4", b"<i8", b"|O8"]))
            case _:
                j = rng.randrange(len(frames))
                frames[i], frames[j] = frames[j], frames[i]
                continue
        frames[i] = bytes(frame)
    return frames
