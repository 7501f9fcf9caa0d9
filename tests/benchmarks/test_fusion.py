"""The benchmark of fused operations, on few elements."""

from benchmark_runs import written


def test_measures_all_ways_and_says_what_is_one_kernel(tmp_path):
    data, markdown, _ = written("fusion", tmp_path, "--elements=100000", "--rounds=2", "--threads=1", "--check")
    (result,) = data["results"]
    assert result["kernels"] == [5, 1]
    assert 0 < result["error"] < 1e-5
    assert set(result["ways"]) == {"eager", "jit-fusion", "torch.compile", "copy of the same bytes"}
    assert all(len(way["values"]) == 2 for way in result["ways"].values())
    # The goals are for a GPU.
    assert data["missed"] == []
    assert "| 100,000 | jit-fusion |" in markdown
