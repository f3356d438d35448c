from octavo.core.kv.waste import measure_waste


def test_paging_wastes_a_fraction_of_what_reserving_does() -> None:
    report = measure_waste(requests=24, input_tokens=(50, 200), output_tokens=(20, 120), max_model_len=512, max_num_seqs=24)
    assert report.preemptions == 0
    assert report.peak_running == 24
    assert 0 < report.paged_average < 0.06
    assert report.paged_average <= report.paged_peak < 0.1
    assert report.contiguous_max_model_len > report.contiguous_max_tokens > 0.2
    assert set(report.as_dict()) >= {"paged_average", "paged_peak", "contiguous_max_model_len", "steps"}


def test_smaller_blocks_waste_less() -> None:
    small, large = (
        measure_waste(requests=12, input_tokens=(50, 100), output_tokens=(20, 60), block_size=size, max_model_len=256, max_num_seqs=12)
        for size in (4, 32)
    )
    assert small.paged_average < large.paged_average / 2


def test_a_cache_that_is_too_small_for_all_still_serves_all() -> None:
    report = measure_waste(requests=24, input_tokens=(50, 200), output_tokens=(20, 120), max_model_len=512, max_num_seqs=24, num_blocks=120)
    assert report.peak_running < 24
    assert report.paged_average < 0.06
