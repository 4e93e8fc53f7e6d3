"""Files as disks, editors and strangers leave them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def check_damage_is_named(folder: Path, read: Callable[[], Any], tries: int) -> list[Path]:
    """Flip one bit at a time in every file: `read` names it, or gives the same. The files."""
    whole, chance = read(), random.Random(0)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        content = file.read_bytes()
        for _ in range(tries):
            changed = bytearray(content)
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(changed)
            found = value_or_message(read)
            assert found == whole or str(file) in str(found)
        file.write_bytes(content)
    return files


def value_or_message(read: Callable[[], Any]) -> Any:
    """What is read, or the message of a ValueError; other errors are raised."""
    try:
        return read()
    except ValueError as error:
        return str(error)
