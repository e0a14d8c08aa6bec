"""Shapes and parameter counts of the model presets."""

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.catalog import DATA, list_models, load_model
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerRun, LayerShape
from memo_sim.contract.model import Model

MEMO_TABLE_2 = {
    "gpt-7b": (32, 4096, 16384, 32),
    "gpt-13b": (40, 5120, 20480, 40),
    "gpt-30b": (48, 7168, 28672, 56),
    "gpt-65b": (80, 8192, 32768, 64),
}
METP_TABLE_3 = {
    "bert-large": (1024, 16, 24, 333_565_952),
    "llama-7b": (4096, 32, 32, 6_738_415_616),
    "llama-70b": (8192, 64, 80, 68_976_648_192),
    "gpt-175b": (12288, 96, 96, 174_590_681_088),
}
"""Hidden size, heads, layers, parameters: published for Llama 2, counted by hand below for the other two."""


QWEN3 = {"qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264}
"""Parameters of the checkpoints that Qwen published."""

GEMMA3 = {"gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304}
"""Parameters of the text models of the checkpoints that Google published."""

EXPERTS = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
}
GPT_OSS = {
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
}
"""Parameters of published checkpoints, and by hand those that one token uses."""


_OF = ("gpt", "llama", "mixtral", "mla", "qwen3-moe", "gemma3", "sinks", "gpt-oss", "deepseek")
TINY = [f"{name}-tiny" for name in _OF]


def test_presets() -> None:
    more = ["llama3-8b", "llama3-70b", "llama3-405b", "deepseek-v3"]
    published = [*MEMO_TABLE_2, *METP_TABLE_3, *more, *QWEN3, *EXPERTS, *GEMMA3, *GPT_OSS]
    assert list_models() == sorted([*published, *TINY])
    for name in list_models():
        model = load_model(name)
        assert model.name == name
        assert model.source
        assert codec.encode(model) == (DATA / "models" / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", MEMO_TABLE_2)
def test_memo_models(name: str) -> None:
    model = load_model(name)
    n, h, ffn, heads = MEMO_TABLE_2[name]
    assert (model.layers, model.hidden, model.ffn_hidden, model.heads) == (n, h, ffn, heads)
    assert (model.head_dim, model.kv_heads, model.vocab) == (128, heads, 50257)
    assert model.mfu_params == 12 * n * h**2 + 50257 * h
    s = 1_048_576
    assert model.step_flops(s, 16) == pytest.approx(16 * (6 * s * model.mfu_params + 6 * n * h * s**2), rel=1e-15)


@pytest.mark.parametrize("name", METP_TABLE_3)
def test_metp_models(name: str) -> None:
    model = load_model(name)
    assert (model.hidden, model.heads, model.layers, model.total_params) == METP_TABLE_3[name]


@pytest.mark.parametrize(("name", "vocab"), [("gpt-175b", 51200), ("bert-large", 30522)])
def test_they_have_twelve_squares_a_layer(name: str, vocab: int) -> None:
    h, _, layers, params = METP_TABLE_3[name]
    biases, norms = 3 * h + h + 4 * h + h, 4 * h
    assert params == layers * (12 * h * h + biases + norms) + vocab * h + 2 * h


def test_attention_without_a_mask_is_twice_the_work() -> None:
    bert = load_model("bert-large")
    masked = msgspec.structs.replace(bert, bidirectional=False)
    assert bert.bidirectional
    s = 65536
    both = [model.step_flops(s) - 6.0 * s * model.mfu_params for model in (bert, masked)]
    assert both[0] == pytest.approx(2 * both[1], rel=1e-12)


@pytest.mark.parametrize(("name", "params"), QWEN3.items())
def test_qwen_3(name: str, params: int) -> None:
    model = load_model(name)
    assert model.total_params == params
    assert (model.qk_norm, model.head_dim, model.vocab) == (True, 128, 151_936)


@pytest.mark.parametrize(
    ("name", "params"), [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)]
)
def test_llama_3(name: str, params: int) -> None:
    model = load_model(name)
    assert model.total_params == params
    assert (model.rope_theta, model.rope_scaling, model.vocab) == (500_000.0, None, 128_256)


@pytest.mark.parametrize(("name", "params"), EXPERTS.items())
def test_experts(name: str, params: tuple[int, int]) -> None:
    """All parameters, and those that one token uses, which the models' names count in billions."""
    model = load_model(name)
    assert (model.total_params, model.active_params) == params
    assert model.experts is not None
    left_out = (model.experts.count - model.experts.per_token) * 3 * model.hidden * model.experts.hidden
    assert model.total_params - model.active_params == model.layers * left_out
    assert model.mfu_params == model.active_params - model.vocab * model.hidden - vectors(model)


def test_deepseek_v3() -> None:
    """Of 671 billion parameters a token uses 37 (arXiv:2412.19437, table 2); the first three layers have MLPs."""
    model = load_model("deepseek-v3")
    assert model.total_params == 671_026_404_352
    assert model.active_params == 37_552_282_624
    assert [model.layer(number).experts is None for number in (0, 2, 3, 60)] == [True, True, False, False]
    assert model.mixture is not None
    assert (model.mixture.shared, model.mixture.selection_rate) == (2048, 0.001)


@pytest.mark.parametrize("name", GPT_OSS)
def test_gpt_oss(name: str) -> None:
    """A token uses 3.6 and 5.1 billion of 20.9 and 116.8 (OpenAI's model card), and its row of the embedding."""
    model, (total, active) = load_model(name), GPT_OSS[name]
    assert (model.total_params, model.active_params) == (total, active)
    assert round((active - model.vocab * model.hidden) / 1e9, 2) == {24: 3.61, 36: 5.13}[model.layers]
    windows = [model.layer(number).window for number in range(model.layers)]
    assert windows == [128, 0] * (model.layers // 2)
    assert model.sinks


def vectors(model: Model) -> int:
    return model.layers * model.vector_params_of(model.layer(0)) + model.hidden


def test_experts_take_the_place_of_the_mlp_of_some_layers() -> None:
    experts = load_model("mixtral-tiny").experts
    tiny = load_model("llama-tiny")
    shapes = [LayerShape(ffn_hidden=384), *[LayerShape(ffn_hidden=384, experts=experts)] * 3]
    mixed = tiny.of_layers(shapes)
    assert (mixed.experts, [run.times for run in mixed.layer_pattern]) == (None, [1, 3])
    assert mixed.layer_params(0) == tiny.layer_params(0)
    assert mixed.layer_params(1) == load_model("mixtral-tiny").layer_params(0)
    assert mixed.of_layers(shapes[1:]).experts == experts
    with pytest.raises(ValueError, match="its shapes say which layers have experts"):
        msgspec.structs.replace(mixed, experts=experts)
    with pytest.raises(ValueError, match="llama family without biases"):
        msgspec.structs.replace(tiny, experts=experts, linear_bias=True)
    with pytest.raises(ValueError, match=r"per_token \(5\) is more than the 4 experts"):
        Experts(count=4, per_token=5, hidden=16)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_read_bytes_on_a_laptop(name: str) -> None:
    model = load_model(name)
    assert model.vocab == 256
    assert model.layers_matrix_params < 1_000_000


def test_latent_attention_by_hand() -> None:
    """Weights and attention's FLOPs of one layer of mla-tiny: 4 heads of 48, values of 32."""
    model = load_model("mla-tiny")
    down, up = 128 * (64 + 32 + 16), 64 * 4 * 48 + 32 * 4 * (32 + 32)
    assert model.attention_params == down + up + 4 * 32 * 128
    assert model.layer_params(0) == model.attention_params + 3 * 128 * 384 + 2 * 128 + 64 + 32
    s = 1024
    pairs = s * s / 2
    attention = 4 * 3 * 2 * pairs * 4 * (48 + 32)  # layers, forward and twice that, two FLOPs, heads, widths
    assert model.step_flops(s) == pytest.approx(6 * s * model.mfu_params + attention)


def test_latent_attention_is_refused_where_no_model_has_it() -> None:
    model = load_model("mla-tiny")
    for fields, says in (
        ({"head_dim": 64}, "head_dim"),
        ({"kv_heads": 2}, "a key for every head"),
        ({"qk_norm": True}, "without biases and norms of heads"),
        ({"latent": msgspec.structs.replace(model.latent, nope_dim=33, rope_dim=16)}, "nope_dim"),
    ):
        with pytest.raises(ValueError, match=says):
            msgspec.structs.replace(model, **fields)
    with pytest.raises(ValueError, match="must be even"):
        LatentAttention(kv_rank=32, nope_dim=32, rope_dim=15, value_dim=32)


@pytest.mark.parametrize("name", GEMMA3)
def test_gemma_3(name: str) -> None:
    """Every sixth layer has no window and the model's rotary base, which is scaled; the others have their own."""
    model = load_model(name)
    assert model.total_params == GEMMA3[name]
    for number in range(model.layers):
        shape, full = model.layer(number), number % 6 == 5
        assert (shape.window, shape.rope_theta) == ((0, 0.0) if full else (1024, 10_000.0))
    assert model.score_scale == pytest.approx({"gemma3-27b": 168}.get(name, 256) ** -0.5)


def test_a_window_counts_the_keys_that_it_sees() -> None:
    model = load_model("llama-tiny")
    for queries, keys, window in [(7, 7, 3), (7, 12, 3), (7, 8, 5), (7, 7, 7), (7, 7, 1), (3, 3, 9)]:
        at = [(q + keys - queries, k) for q in range(queries) for k in range(keys)]
        assert pairs_in_window(queries, keys, window) == sum(q - window < k <= q for q, k in at)
    s, products = 4096, 6.0 * 4096 * model.mfu_params
    windowed = msgspec.structs.replace(model, window=100)
    pairs = pairs_in_window(s, s, 100)
    assert windowed.step_flops(s) - products == pytest.approx(12.0 * model.layers * model.q_width * pairs)
    assert windowed.step_flops(100) == model.step_flops(100)
    half = model.of_layers([LayerShape(ffn_hidden=384, window=w) for w in (100, 0, 100, 0)])
    assert half.step_flops(s) == pytest.approx((windowed.step_flops(s) + model.step_flops(s)) / 2)


def test_layers_that_repeat_have_a_short_pattern() -> None:
    model = load_model("llama-tiny")
    shapes = [LayerShape(ffn_hidden=384, window=w) for w in (16, 16, 0, 16, 16)]
    assert [(run.shape.window, run.times) for run in model.of_layers(shapes).layer_pattern] == [(16, 2), (0, 1)]
    alike = model.of_layers(shapes[:2])
    assert (alike.window, alike.layer_pattern) == (16, ())
    own = [LayerShape(ffn_hidden=384, rope_theta=100.0)] * 3
    assert model.of_layers(own).layer(2).rope_theta == 100.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 16, "layer_pattern": (LayerRun(shape=LayerShape(ffn_hidden=384)),)}, "which layers have windows"),
        ({"post_norms": True, "linear_bias": True}, "norms behind attention and MLP"),
        ({"post_norms": True, "proj_bias": True}, "norms behind attention and MLP"),
        ({"window": 16, "bidirectional": True}, "causal"),
        ({"sinks": True, "bidirectional": True}, "causal"),
    ],
)
def test_what_windows_and_norms_behind_do_not_go_with(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        msgspec.structs.replace(load_model("llama-tiny"), **changes)


def test_total_params_of_gpt_counts_everything_once() -> None:
    model = load_model("gpt-tiny")
    h, f = model.hidden, model.ffn_hidden
    matrices = 4 * h * h + 2 * h * f
    biases = 3 * h + h + f + h
    norms = 4 * h
    expected = model.layers * (matrices + biases + norms) + 256 * h + model.max_positions * h + 2 * h
    assert model.total_params == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_heads": 3}, r"heads \(4\).* kv_heads \(3\)"),
        ({"head_dim": 15}, r"head_dim \(15\)"),
        ({"activation": "gelu"}, r"activation .*llama.* silu.* gelu"),
        ({"family": "gpt"}, r"activation .*gpt.* gelu.* silu"),
    ],
)
def test_impossible_shapes(changes: dict[str, object], named: str) -> None:
    shape = {field: getattr(load_model("llama-tiny"), field) for field in Model.__struct_fields__}
    with pytest.raises(ValueError, match=named):
        Model(**{**shape, **changes})


WIDE, NARROW = LayerShape(ffn_hidden=512), LayerShape(ffn_hidden=128)


def differing(layers: int, *runs: tuple[LayerShape, int]) -> Model:
    pattern = tuple(LayerRun(shape=shape, times=times) for shape, times in runs)
    tiny = load_model("llama-tiny")
    return msgspec.structs.replace(tiny, layers=layers, ffn_hidden=512, layer_pattern=pattern)


def test_a_pattern_repeats_and_its_last_repetition_is_cut_short() -> None:
    assert differing(5, (WIDE, 1), (NARROW, 1)).layer_kinds == (0, 1, 0, 1, 0)
    assert differing(8, (NARROW, 5), (WIDE, 1)).layer_kinds == (0, 0, 0, 0, 0, 1, 0, 0)
    model = differing(61, (WIDE, 3), (NARROW, 58))
    assert model.layer_shapes == (WIDE, NARROW)
    assert [model.layer(n) for n in (0, 2, 3, 60)] == [WIDE, WIDE, NARROW, NARROW]


def test_parameters_are_counted_by_layer() -> None:
    model = differing(3, (WIDE, 1), (NARROW, 2))
    h, attention = model.hidden, model.hidden * (2 * model.q_width + 2 * model.kv_width)
    assert [model.layer_params(n) for n in range(3)] == [
        attention + 3 * h * ffn + 2 * h for ffn in (512, 128, 128)
    ]  # three matrices of the MLP, two RMSNorms
    assert model.layers_matrix_params == 3 * attention + 3 * h * (512 + 128 + 128)
    assert model.total_params == sum(model.layer_params(n) for n in range(3)) + 2 * model.vocab * h + h
    assert model.mfu_params == model.layers_matrix_params + model.vocab * h


def test_too_many_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="has 65 kinds of layers, but at most 64 are planned"):
        load_model("llama-tiny").of_layers([LayerShape(ffn_hidden=64 * (1 + n)) for n in range(65)])


def test_equal_layers_need_no_pattern() -> None:
    model = differing(6, (WIDE, 1), (NARROW, 1))
    alike = model.of_layers([NARROW] * 4)
    assert (alike.layers, alike.ffn_hidden, alike.layer_pattern) == (4, 128, ())
    assert model.of_layers([WIDE, NARROW, NARROW]).layer_kinds == (0, 1, 1)
    assert alike.layer_shapes == (NARROW,)


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        ([{"shape": {"ffn_hidden": 512}, "times": 9}], "layer_pattern has 9 layers, but the model has only 4"),
        ([{"shape": {"ffn_hidden": 128}}], r"ffn_hidden \(512\) must be that of the widest layer \(128\)"),
    ],
)
def test_wrong_patterns_are_refused(pattern: list[object], wrong: str) -> None:
    document = {**msgspec.to_builtins(differing(4)), "layer_pattern": pattern}
    with pytest.raises(msgspec.ValidationError, match=wrong):
        msgspec.convert(document, Model)
