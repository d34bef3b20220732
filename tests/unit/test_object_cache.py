"""The bounded cache of objects on disk, which threads and processes share."""

from pathlib import Path

from workers.cache import ObjectCache


def test_the_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 8)
    first, second, third = (cache.put(data) for data in (b"1234", b"5678", b"9012"))
    assert not first.exists()
    assert (second.read_bytes(), third.read_bytes()) == (b"5678", b"9012")


def test_a_file_that_another_process_drops_meanwhile_is_passed_over(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 8)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # listed, and not there when it is looked at
    assert cache.put(b"1234").read_bytes() == b"1234"
