"""Files as disks, editors and strangers leave them."""

import random


def damaged(whole: bytes, seed: int) -> bytes:
    """The bytes with some changed, left out, doubled or cut off."""
    draw = random.Random(seed)
    content = bytearray(whole)
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(content) or 1)
        match draw.randrange(4):
            case 0:
                content[place : place + 1] = [draw.randrange(256)]
            case 1:
                del content[place : place + draw.randint(1, 40)]
            case 2:
                content[place:place] = content[place : place + draw.randint(1, 40)]
            case 3:
                del content[max(1, place) :]
    return bytes(content)
