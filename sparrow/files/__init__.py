"""Files that people share: written whole or not at all, with a digest that is checked at reading.

A JSON document (schedule, surface, plan) holds the sha256 of its content under "digest", whatever
its layout. A JSON line (metrics, rollouts) ends with a digest of its own text, a configuration
begins with one; folders (models, finished runs) have SHA256SUMS. What has none is older or made by
hand, and is read as it is; a digest that does not match is an error. Reading runs no code. Standard
library alone.
"""

from sparrow.files.disk import (
    FULL,
    LOCK,
    FolderLock,
    check_regular,
    expanded,
    explained,
    make_folder,
    open_append,
    open_lock,
    remove_unfinished,
    sync,
    sync_folder,
    unfinished_path,
    unfinished_paths,
    write_whole,
)
from sparrow.files.documents import (
    CONTROL,
    Json,
    add_digest_line,
    check_digest_line,
    content_digest,
    document_text,
    parse_document,
    parse_json,
    parse_line,
    printable,
    read_document,
    read_lines,
    read_text,
    sealed,
    unsealed,
    write_document,
)
from sparrow.files.sums import (
    SUMS,
    cached_digest,
    file_digest,
    has_sums,
    read_sums,
    verify,
    write_sums,
)

__all__ = [
    "CONTROL",
    "FULL",
    "LOCK",
    "SUMS",
    "FolderLock",
    "Json",
    "add_digest_line",
    "cached_digest",
    "check_digest_line",
    "check_regular",
    "content_digest",
    "document_text",
    "expanded",
    "explained",
    "file_digest",
    "has_sums",
    "make_folder",
    "open_append",
    "open_lock",
    "parse_document",
    "parse_json",
    "parse_line",
    "printable",
    "read_document",
    "read_lines",
    "read_sums",
    "read_text",
    "remove_unfinished",
    "sealed",
    "sync",
    "sync_folder",
    "unfinished_path",
    "unfinished_paths",
    "unsealed",
    "verify",
    "write_document",
    "write_sums",
    "write_whole",
]
