"""The seconds and bytes of a checkpoint, on disk and in a bucket."""

from scripts.benchmarks import checkpoint_stores


def test_each_folder_gets_a_line_and_is_left_empty(store_and_url, tmp_path, capsys):
    server, url = store_and_url
    folders = [str(tmp_path / "disk"), f"{url}/there"]
    assert checkpoint_stores.main([*folders, "--mib", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["MiB", "save", "s", "verify", "s", "restore", "s"]
    assert [line.split()[0] for line in lines] == folders
    # Parameters and two moments of random numbers, which hardly compress.
    assert all(2.5 < float(line.split()[1]) < 3.2 for line in lines)
    assert not server.store.names() and not list((tmp_path / "disk").rglob("*.json"))
