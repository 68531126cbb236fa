"""Marks of a job's prompt, from the bytes of its body: jobs with a mark in common have prompts that begin alike."""

import hashlib


def marks_of(body: bytes) -> tuple[str, int]:
    """Return the marks as 'mark end mark end ...', and the bytes from `"messages":` on, which the ends count too. A
    mark is made of all bytes up to its end. Fields before the messages may differ from job to job, so none counts. Of a
    file's `data:` URL only the beginning counts: an image has far fewer tokens than a text of its bytes."""
    body = _without_files(body)
    head = body[: 1 << 18]  # a client chooses the length of a body; so many bytes take 0.6 ms
    first = max(0, head.find(b'"messages":'))
    wanted = set[int]()
    for size in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18):
        # The last six: a turn that is D bytes longer has a mark less than D before the end of this one.
        last = (len(head) - first) // size
        wanted.update(at * size for at in range(max(1, last - 5), last + 1))
    found, chain = list[str](), ""
    block = 1024  # bytes
    for end in range(block, len(head) - first + 1, block):
        chunk = head[first + end - block : first + end]
        chain = hashlib.sha1(chain.encode() + chunk, usedforsecurity=False).hexdigest()
        if end in wanted:
            found += [chain[:12], str(end)]
    return " ".join(found), len(body) - first


def _without_files(body: bytes) -> bytes:
    """Return a body of which the `data:` URLs in base64 are cut to 4 KiB, if they are among the first 500 strings that
    begin with "data:"."""
    parts, at = list[bytes](), 0
    for _ in range(500):  # a client chooses how many there are
        first = body.find(b'"data:', at)
        end = body.find(b'"', first + 1) if first >= 0 else -1
        if end < 0:
            break
        is_file = body.find(b";base64,", first, first + 128) >= 0  # a text may begin with "data:"
        parts.append(body[at : min(end, first + 4096) if is_file else end])
        at = end
    return b"".join((*parts, body[at:]))
