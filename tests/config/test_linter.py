from __future__ import annotations

from pathlib import Path

import pytest

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config, read_config_text

BATCH = {"train_micro_batch_size_per_gpu": 1}


def codes(config: dict[str, object], world_size: int | None = None) -> list[tuple[str, str | None]]:
    return [(finding.code, finding.where.pointer) for finding in lint(config, world_size=world_size)]


def test_findings_of_a_text_come_in_its_order_with_line_and_column() -> None:
    text = '{\n "zero_optimisation": {},\n "mine": 1,\n "gradient_cliping": 0.5,\n "train_batch_size": 8\n}'
    found = [(finding.code, str(finding.where)) for finding in lint(read_config_text(text, "c.json"))]
    assert found == [
        ("DS001", "c.json:2:2 /zero_optimisation"),
        ("DS002", "c.json:3:2 /mine"),
        ("DS001", "c.json:4:2 /gradient_cliping"),
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("bf_16", "bf16"),
        ("FP16", "fp16"),
        ("train_batch_size ", "train_batch_size"),
        ("train-micro-batch-size-per-gpu", "train_micro_batch_size_per_gpu"),
    ],
)
def test_a_slip_of_the_pen_is_an_error_that_names_the_real_key(key: str, meant: str) -> None:
    (finding,) = lint({**BATCH, key: {}})
    assert finding.code == "DS001"
    assert finding.fix == f"did you mean `{meant}`?"


@pytest.mark.parametrize("key", ["$schema", "_comment", "x-owner", "ds_toolkit"])
def test_what_is_nobodys_business_is_left_alone(key: str) -> None:
    assert codes({**BATCH, key: {}}) == []


def test_a_zero_key_of_the_top_level_is_named_inside_zero() -> None:
    (finding,) = lint({**BATCH, "zero_optimization": {"stage": 3, "aio": {}}})
    assert (finding.code, finding.where.pointer) == ("DS004", "/zero_optimization/aio")
    assert finding.fix == "`aio` belongs at the top level"


@pytest.mark.parametrize(
    ("sizes", "world_size", "fires"),
    [
        ((256, 2, 16), 8, False),
        ((256, 2, 18), 7, True),
        ((256, 2, None), 8, False),
        ((256, None, 3), 8, True),
        ((8, None, None), 3, True),
        ((10, 4, None), None, True),
        ((12, 4, None), None, False),
        ((12, 4, 2), None, True),
        ((None, 4, 2), 7, False),
    ],
)
def test_batch_sizes_must_multiply(
    sizes: tuple[int | None, ...], world_size: int | None, fires: bool
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config: dict[str, object] = {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}
    assert codes(config, world_size) == ([("DS102", "/train_batch_size")] if fires else [])


def test_the_nearest_batch_sizes_that_work_are_named() -> None:
    (finding,) = lint({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})
    assert finding.fix == "set it to 8 or 12, or leave it out"
    (finding,) = lint({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4}, world_size=3)
    assert finding.fix == "set it to 12 or 24, or leave it out"


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, ["DS119"]),
        ({"offload_optimizer": {"device": "cpu"}}, ["DS401"]),
        ({"stage": "2", "offload_param": {"device": "nvme"}}, ["DS401"]),
        ({"stage": 2, "offload_param": {"device": "none"}}, []),
        ({"stage": 4}, ["DS201"]),
        ({"stage": None}, ["DS201"]),
        (True, ["DS011"]),
        (None, ["DS008"]),
    ],
)
def test_stages_and_offloading(zero: object, expected: list[str]) -> None:
    assert [code for code, _ in codes({**BATCH, "zero_optimization": zero})] == expected


def test_enabled_is_read_as_deepspeed_reads_it() -> None:
    fp16: dict[str, object] = {**BATCH, "fp16": {"enabled": "true"}}
    assert codes({**fp16, "bf16": {"enabled": 1}}) == [("DS301", "/fp16")]
    assert codes({**fp16, "bf16": {"enabled": "false"}}) == []
    assert codes({**fp16, "bf16": {}, "bfloat16": {"enabled": True}}) == [("DS012", "/bfloat16")]
    assert codes({**fp16, "bfloat16": {"enabled": True}}) == [("DS011", "/bfloat16"), ("DS301", "/fp16")]


def test_a_whole_number_may_be_written_as_a_float() -> None:
    config: dict[str, object] = {"train_batch_size": 8.0, "steps_per_print": 1e1, "pipeline": {"stages": 2.0}}
    assert lint(config, world_size=4) == []
    assert codes({**BATCH, "steps_per_print": 1.5}) == [("DS015", "/steps_per_print")]


def test_ranks_that_share_a_sequence_count_once() -> None:
    config: dict[str, object] = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "sequence_parallel_size": 2,
    }
    assert codes(config, world_size=8) == []
    assert codes(config, world_size=16) == [("DS102", "/train_batch_size")]


def test_the_accumulation_that_comes_nearest_is_named() -> None:
    config: dict[str, object] = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    (finding,) = lint(config, world_size=7)
    assert finding.fix == ("set it to 28, or leave it out; 252 would need `gradient_accumulation_steps` 18")


@pytest.mark.parametrize("key", ["model_parallel_size", "data_path"])
def test_keys_that_only_look_alike_are_no_slips(key: str) -> None:
    assert codes({**BATCH, key: 1}) == [("DS002", f"/{key}")]


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        ({"log_level": "INFO"}, None),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}, 8),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, 1),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 16}}, 8),
        ({"steps_per_print": -1}, None),
        ({"checkpoint": {"tag_validation": "wArN"}}, None),
    ],
)
def test_what_runs_is_no_error(config: dict[str, object], world_size: int | None) -> None:
    assert codes({**BATCH, **config}, world_size) == []


@pytest.mark.parametrize(
    ("config", "code", "fix"),
    [
        ({"micro_batch_size": 1}, "DS005", "write `train_micro_batch_size_per_gpu`"),
        ({"batch_size": 1}, "DS005", "write `train_batch_size`"),
        ({"train_batch": 1}, "DS005", "write `train_batch_size`"),
        ({"num_workers": 1}, "DS002", "remove it, or mark it as your own: `x-num_workers`"),
        ({"max_tokens": 1}, "DS002", "remove it, or mark it as your own: `x-max_tokens`"),
        ({"find_unused_parameter": True}, "DS020", "remove it: `zero_optimization."),
        ({"steps_per_print": 0}, "DS017", "expected: greater than or equal to 1 or less than or equal to -1"),
        ({"gradient_clipping": "1_0"}, "DS013", "expected: "),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0.4}}, "DS015", "write 1"),
        ({"steps_per_print": -0.4}, "DS015", "write 0"),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 1}},
                "gradient_clipping": 1,
            },
            "DS114",
            "remove it: `gradient_clipping` is set",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "DS119",
            'add `optimizer`, or "zero_force_ds_cpu_optimizer": false',
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True, "offload_param": {}}},
            "DS012",
            "keep `offload_param`, remove `cpu_offload_param`",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            "DS019",
            "write the value; a file for one that resolves it is linted with --for hf or accelerate",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": "auto"}}},
            "DS019",
            "write the value; a file for one that resolves it is linted with --for hf",
        ),
        (
            {"steps_per_print": "auto"},
            "DS019",
            "write the value; a file for one that resolves it is linted with --for hf or accelerate",
        ),
    ],
)
def test_advice_is_about_what_was_meant(config: dict[str, object], code: str, fix: str) -> None:
    (finding,) = lint({**BATCH, **config})
    assert finding.code == code
    assert (finding.fix or "").startswith(fix)
    assert finding.edit is None


@pytest.mark.parametrize("consumer", list(Consumer))
def test_a_byte_order_mark_is_passed_over_by_deepspeed_alone(consumer: Consumer, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('\ufeff{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "mine": 1}')
    found = [(finding.code, str(finding.where)) for finding in lint(read_config(path), consumer=consumer)]
    mark = [] if consumer is Consumer.NATIVE else [("DS803", f"{path}:1:1")]
    assert found == [*mark, ("DS002", f"{path}:1:60 /mine")]


def test_accelerate_makes_nothing_of_the_old_name_of_bf16() -> None:
    config = {**BATCH, "bfloat16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    messages = {
        consumer: finding.message for consumer in Consumer for finding in lint(config, consumer=consumer)
    }
    assert messages[Consumer.NATIVE] == "`bfloat16` is the old name of `bf16`"
    assert messages[Consumer.HF].startswith(
        "`bfloat16` has no effect: the Hugging Face Trainer writes `bf16`"
    )


def test_the_trainer_gathers_nothing_for_auto() -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}
    config = {**BATCH, "zero_optimization": zero}
    assert [finding.code for finding in lint(config, consumer=Consumer.HF)] == ["DS210"]
    assert lint(config, consumer=Consumer.ACCELERATE) == []


def test_the_old_name_of_a_thread_count_is_a_warning() -> None:
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
    (finding,) = lint({**BATCH, "aio": {"thread_count": 1}, "zero_optimization": nvme})
    assert (finding.code, finding.severity.value) == ("DS011", "warning")
    assert finding.fix == "write `intra_op_parallelism`"
