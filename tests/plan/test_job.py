from __future__ import annotations

import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Cluster, Job, Model, Precision


@pytest.mark.parametrize(
    ("num_parameters", "num_layers", "hidden_size"),
    [(125 * 10**6, 12, 768), (1_300 * 10**6, 24, 2048), (6_740 * 10**6, 32, 4096), (175 * 10**9, 96, 12288)],
    ids=["GPT-3 small", "GPT-3 XL", "Llama 7B", "GPT-3"],
)
def test_a_guessed_shape_is_near_published_ones(
    num_parameters: int, num_layers: int, hidden_size: int
) -> None:
    model = Model.from_count(num_parameters)
    assert model.hidden_size == pytest.approx(hidden_size, rel=0.2)
    assert model.num_layers == pytest.approx(num_layers, rel=0.3)


@pytest.mark.parametrize("num_parameters", [10**power * lead for power in range(5, 12) for lead in (1, 3)])
def test_a_guessed_shape_holds_about_as_many_parameters(num_parameters: int) -> None:
    model = Model.from_count(num_parameters)
    blocks = 12 * model.num_layers * model.hidden_size**2
    assert blocks + model.vocabulary_size * model.hidden_size == pytest.approx(num_parameters, rel=0.25)
    assert str(model.hidden_size) in model.rationale


@pytest.mark.parametrize("num_parameters", [0, -1])
def test_a_model_has_parameters(num_parameters: int) -> None:
    with pytest.raises(ToolkitError, match="number of parameters is"):
        Model.from_count(num_parameters)


def test_the_largest_layer_is_a_block_or_the_embedding() -> None:
    assert Model(10**9, 10, 100, 32_000).largest_layer_parameters == 3_200_000
    assert Model(10**9, 10, 1000, 256).largest_layer_parameters == 12_000_000
    assert Model(100, 1, 16, 256).largest_layer_parameters == 100


def test_a_step_takes_micro_batch_times_accumulation_times_ranks() -> None:
    job = Job(Model.from_count(10**6), Cluster(2, 4, 10**9, None), Precision.BF16, 3, 5, 128)
    assert job.global_batch_size == 2 * 4 * 3 * 5


@pytest.mark.parametrize("field", range(4))
def test_a_cluster_of_nothing_is_refused(field: int) -> None:
    numbers = [1, 1, 1, 1]
    numbers[field] = 0
    with pytest.raises(ToolkitError, match="is 0"):
        Cluster(*numbers)


@pytest.mark.parametrize("field", range(3))
def test_a_job_without_work_is_refused(field: int) -> None:
    numbers = [1, 1, 1]
    numbers[field] = 0
    with pytest.raises(ToolkitError, match="is 0"):
        Job(Model.from_count(10**6), Cluster(1, 1, None, None), Precision.FP32, *numbers)
