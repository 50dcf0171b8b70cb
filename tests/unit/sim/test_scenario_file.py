"""A scenario's file is read strictly: what is wrong is named with what is allowed; variants change keys."""

import tomllib
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelyard.config import FleetConfig, GatewayConfig
from modelyard.control.api.deploy_spec import HardwareBody, ScalingBody
from modelyard.sim import scenario_body
from modelyard.sim.scenario_file import ScenarioError, merged
from modelyard.sim.scenarios import Scenario, run, scenario_of


def of(text: str, folder: Path = Path()) -> Scenario:
    return scenario_of(tomllib.loads(text), folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("titel = 'x'", ["titel: this field does not exist here; did you mean 'title'?"]),
        ("level = 'planet'", ["level: 'planet' is neither 'request' (one endpoint) nor 'fleet' (many)"]),
        ("[hardware]\ngpu_typ = 'l4'", ["hardware.gpu_typ: this field does not exist here; did you mean 'gpu_type'?"]),
        ("[hardware]\ngpu_type = 'l5'", ["hardware.gpu_type: nothing is known of 'l5'; use one of cpu, t4,"]),
        ("[hardware]\ngpu_type = 'cpu'", ["hardware: a cpu has the memory of its machine: say how much"]),
        ("model = 'llama-3.3-70b'", ["hardware: llama-3.3-70b takes 132 GiB in bf16, and 1 x l4 have"]),
        ("model = 'gpt'", ["^model: 'gpt' is neither a file nor one of llama-3.2-3b,"]),
        ("precision = 'fp9'", ["precision: 'fp9' is none; use one of bf16, fp8"]),
        ("precision = 'q4_k_m'", ["hardware: q4_k_m cannot run on l4: choose one of bf16, fp8, int8, int4"]),
        ("[hardware]\nmin_replicas = 0", ["hardware.min_replicas: 0 needs scaling.scale_to_zero = true"]),
        ("[hardware]\nmin_replicas = 3\nmax_replicas = 2", ["hardware.max_replicas: must be 3 (min_replicas) or more"]),
        ("[autoscale]\nup_kv = 0.5", ["autoscale.up_kv: must be 1 to 100"]),
        ("[autoscale]\nidle = 'lerned'", ["autoscale.idle:", "use one of fixed, learned"]),
        ("[autoscale]\ndown_utilization = 90", ["autoscale.down_utilization: must be below up_utilization (85)"]),
        ("[autoscale]\nprewarm = false", ["autoscale.prewarm: changes nothing at this level"]),
        ("[autoscale]\ntier = 'cold'", ["autoscale.tier: 'cold' needs scaling.scale_to_zero"]),
        ("[engine]\nmax_num_batched_tokens = 64", ["engine.max_num_batched_tokens: must be max_num_seqs (256)"]),
        ("[engine]\nslowdown = 0", ["engine.slowdown: expected float >= 0.001"]),
        ("[traffic]\narrivals = 'sometimes'", ["traffic.arrivals:", "use one of poisson, constant, bursty"]),
        ("[traffic]\ninput_tokens = 'long'", ["traffic.input_tokens: 'long' is no length; write 512, uniform:100:900"]),
        ("[traffic]\nrate = 1e5\nminutes = 1000", ["traffic.rate: comes to 6,000,000,000 requests; 1,000,000 at most"]),
        ("[[traffic]]\n[[traffic]]\nrate = -1", ["traffic[1].rate:"]),
        ("[[releases]]\nweigth = 3", ["releases[0].weigth: this field does not exist here; did you mean 'weight'?"]),
        ("[[releases]]\n[[releases]]", ["releases: two have the same version; give each its own"]),
        ("[[variant]]\nrate = 3", ["variant[0].name: is required"]),
        ("[[variant]]\nname = 'a'\n[[variant]]\nname = 'a'", ["variant[1].name: 'a' is another one's"]),
        ("[[variant]]\nname = 'a'\nseed = 3", ["variant[0].seed: is the same for all variants"]),
        ("[variant]\nname = 'a'", ["variant: write [[variant]]"]),
        ("[[variant]]\nname = 'a'\nhardware.gpu_type = 'l5'", ["variant[0].hardware.gpu_type: nothing is known of"]),
        ("level = 'fleet'\n[[nodes]]\nkind = 'cpu'\ncount = 1", ["nodes[0].kind: nothing is known of 'cpu'; use"]),
        ("level = 'fleet'\n[traffic]\nshare_pooled = 0.95", ["traffic.share_small: and share_pooled are more"]),
        ("level = 'fleet'\n[loading]\ndisk = 0", ["loading.disk: must be 1,000,000 or more: bytes a second"]),
        ("level = 'fleet'\n[faults]\nrepair_s = -1", ["faults.repair_s: must be 0 or more"]),
        ("level = 'fleet'\ntraces = 'nowhere'", ["traces: nowhere/servegen_rates_10min.npz cannot be read"]),
        ("level = 'fleet'\nmodel = 'x'", ["model: this field does not exist here"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, told: list[str]) -> None:
    with pytest.raises(ScenarioError) as refused:
        of(text)
    # One that begins with ^ is all that is told.
    assert all(
        str(refused.value).startswith(part[1:]) if part[0] == "^" else part in str(refused.value) for part in told
    ), str(refused.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ScenarioError) as refused:
        of("seed = 'x'\n[hardware]\nmin_replicas = -1\n[[variant]]\n")
    assert [fault.param for fault in refused.value.faults] == ["variant[0].name", "hardware.min_replicas", "seed"]


def test_a_variant_changes_keys_and_keeps_the_others() -> None:
    base = {"hardware": {"gpu_type": "l4", "gpu_count": 2}, "traffic": [{"rate": 1}, {"rate": 2}], "nodes": [{"a": 1}]}
    found = merged(base, {"hardware": {"gpu_type": "h100"}, "traffic": {"rate": 8}, "nodes": [{"a": 2}]})
    assert found == {
        "hardware": {"gpu_type": "h100", "gpu_count": 2},
        "traffic": [{"rate": 8}, {"rate": 8}],
        "nodes": [{"a": 2}],
    }
    assert base["traffic"] == [{"rate": 1}, {"rate": 2}], "the file itself stays as it is"


def test_a_variant_may_change_policy_hardware_replicas_price_and_traffic() -> None:
    found = of("""
        [gateway]
        queue_wait_s = 9
        [[variant]]
        name = "a"
        [[variant]]
        name = "b"
        hardware = {gpu_type = "h100", gpu_count = 2, min_replicas = 3, max_replicas = 5}
        autoscale.up_queue = 7
        fleet.accelerator_prices.h100 = 1.5
        traffic.rate = 4
        """)
    first, second = found.worlds
    assert first.spec.scaling is None
    assert second.spec.scaling is not None
    assert (second.spec.scaling.min_replicas, second.spec.scaling.max_replicas) == (3, 5)
    assert second.spec.autoscale.up_queue == 7
    assert first.spec.queue_wait_s == second.spec.queue_wait_s == 9.0
    assert [(one.accelerators, one.usd_per_hour) for one in second.prices.values()] == [(2, 3.0)]
    (slow,), (fast,) = (one.spec.releases for one in (first, second))
    assert slow.engine.speed.step_s > 5 * fast.engine.speed.step_s
    assert len(second.arrivals(1)) > 3 * len(first.arrivals(1))


def test_releases_have_what_the_file_says_of_all_and_share_replicas_by_weight() -> None:
    found = of("""
        model = "llama-3.2-3b"
        [hardware]
        gpu_type = "l40s"
        min_replicas = 5
        [engine]
        max_num_seqs = 7
        [[releases]]
        version = "stable"
        weight = 80
        [[releases]]
        version = "canary"
        weight = 20
        engine.slowdown = 2.0
        """)
    stable, canary = found.worlds[0].spec.releases
    assert (stable.replicas, canary.replicas) == (4, 1)
    assert stable.engine.max_num_seqs == canary.engine.max_num_seqs == 7
    assert canary.engine.speed.step_s == pytest.approx(2 * stable.engine.speed.step_s)


def test_an_engines_own_numbers_need_no_model_that_is_known() -> None:
    found = of("[hardware]\ngpu_type = 'tpu'\n[engine]\nkv_tokens = 4096\nspeed = {step_s = 0.01, kv_token_s = 1e-7}")
    engine = found.worlds[0].spec.releases[0].engine
    assert (engine.speed.step_s, engine.speed.kv_token_s, engine.kv_tokens) == (0.01, 1e-7, 4096)
    assert found.worlds[0].prices["v1"].usd_per_hour == 0.0


def test_an_answer_ends_where_the_cache_does_and_prompts_beyond_it_are_refused() -> None:
    text = "[hardware]\ngpu_type='x'\n[engine]\nkv_tokens=2048\nspeed={step_s=0.01}\n[traffic]\noutput_tokens='9000'\n"
    variant = of(text + "input_tokens='1000'").worlds[0]
    assert {one.output_tokens for one in variant.arrivals(1)} == {2048 - 1000 - 16}
    with pytest.raises(ScenarioError, match=r"routing.knows_kv: a prompt has 3,000 tokens and the KV cache 2,048"):
        of(text + "input_tokens='3000'\n[routing]\nknows_kv=false").worlds[0].arrivals(1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (scenario_body.GatewayBody, GatewayConfig),
        (scenario_body.FleetGatewayBody, GatewayConfig),
        (scenario_body.FleetBody, FleetConfig),
        (scenario_body.ScalingBody, ScalingBody),
        (scenario_body.FleetScalingBody, ScalingBody),
        (scenario_body.FleetHardwareBody, HardwareBody),
    ],
)
def test_settings_are_called_as_where_they_are_copied_to(
    ours: type[msgspec.Struct], theirs: type[msgspec.Struct]
) -> None:
    assert set(ours.__struct_fields__) <= set(theirs.__struct_fields__)


def test_hardware_is_called_as_in_a_deployment_but_for_a_machines_memory() -> None:
    ours = set(scenario_body.HardwareBody.__struct_fields__)
    assert ours - set(HardwareBody.__struct_fields__) == {"memory_gib"}


@pytest.mark.parametrize("name", ["queue_max", "queue_wait_s", "load_wait_s"])
def test_defaults_are_those_of_the_configuration(name: str) -> None:
    for body in (scenario_body.GatewayBody(), scenario_body.FleetGatewayBody()):
        default: Any = getattr(GatewayConfig(), name)
        assert getattr(body, name) == default


def test_shape_values_and_variants_are_judged_in_one_go() -> None:
    with pytest.raises(ScenarioError) as refused:
        of("""
            titel = 'x'
            precision = 'fp9'
            [hardware]
            gpu_typ = 'l4'
            min_replicas = 4
            max_replicas = 2
            [traffic]
            rate = -1
            input_tokens = 'long'
            [autoscale]
            target_ttft_s = nan
            [[variant]]
            name = 'a'
            traffic.rat = 3
            [[variant]]
            name = 'b'
            hardware.gpu_type = 'l5'
            """)
    told = {fault.param for fault in refused.value.faults}
    assert told == {
        "titel", "precision", "hardware.gpu_typ", "traffic.rate", "traffic.input_tokens", "autoscale.target_ttft_s",
        "hardware.max_replicas", "variant[0].traffic.rat",
        "variant[1].hardware.gpu_type",
    }  # fmt: skip


def test_a_fault_that_may_follow_from_another_is_not_told() -> None:
    with pytest.raises(ScenarioError) as refused:
        of("model = 'llama-3.3-70b'\n[hardware]\ngpu_type = 7")
    assert [fault.param for fault in refused.value.faults] == ["hardware.gpu_type"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[variant]]\nname = "a\\nb"', "variant[0].name: must be one line of 60 letters"),
        ('title = "a\\u001b[31m"', "title: must be one line of 200 letters"),
        ("seed = 100000000000000000000", "seed: expected int <="),
        ("[hardware]\nmin_replicas = 1000000", "hardware.min_replicas: expected int <= 1024"),
        ("[traffic]\nshared_prefix_tokens = 1000000000", "traffic.shared_prefix_tokens: expected int <= 1000000"),
        ("[traffic]\nburstiness = 1e-200", "traffic.burstiness: expected float >= 0.01"),
        ("[traffic]\nperiod_hours = 1e-300", "traffic.period_hours: expected float >= 0.01"),
        ("[traffic]\nbegin_minutes = 99999", "traffic.begin_minutes: ends after minute 100,000"),
        ("[traffic]\nfile = '~nobody-here/x'", "traffic.file: '~nobody-here/x' is in the folder of a user who"),
        ("model = '~nobody-here/x'", "model: '~nobody-here/x' is in the folder of a user who"),
        ("model = 'bge-m3'", "model: 'bge-m3' does not say a size of its KV cache"),
        ("level = 'fleet'\nhours = 48\nstart_day = 13", "hours: ends after day 14 of the rates"),
        ("level = 'fleet'\nwarmup_s = 90000\nstart_day = 1", "warmup_s: begins before the rates do"),
        ("level = 'fleet'\nhours = 0.01", "hours: expected float >= 0.2"),
        ("level = 'fleet'\n[traffic]\nbases = 1000000000", "traffic.bases: expected int <= 100000"),
        ("level = 'fleet'\n[faults]\nrepair_s = nan", "faults.repair_s: must be 0 or more"),
        (f"level = 'fleet'\n[loading]\ndisk_bytes = {10**400}", "loading.disk_bytes: must be 0 or more"),
        ("level = 'fleet'\n[measures]\nstatic_batch = 0", "measures.static_batch: must be 1 or more"),
        ("[[traffic]]\n" * 65, "traffic: there are 65; write 64 at most"),
        ("[[traffic]]\nrate = 1000\n" * 20, "traffic[0].rate: comes to 12,000,000 requests; 1,000,000 at most"),
        ("level = 'fleet'\n[[nodes]]\nkind = 'l4'\ncount = 1000000000", "nodes[0].count: expected int <= 20000"),
        ("[traffic]\nrate = nan\nminutes = inf", "traffic.minutes: expected float <= 100000.0; traffic.rate: expected"),
    ],
)
def test_what_would_run_for_days_or_break_what_is_shown_is_refused(text: str, told: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        of(text)
    assert told in str(refused.value), str(refused.value)


def test_a_file_that_cannot_be_read_is_told_before_anything_runs_at_its_variant(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("time\n1\n", "utf-8")
    text = "[traffic]\nfile='some.csv'\n[[variant]]\nname='a'\n[[variant]]\nname='b'\ntraffic.file='none.csv'"
    with pytest.raises(ScenarioError, match=r"^variant\[1\].traffic.file: .*none.csv cannot be read: No such file"):
        of(text, tmp_path)


def test_times_in_milliseconds_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("time\n1760000000000\n1760086400000\n", "utf-8")
    variant = of("[traffic]\nfile='some.csv'", tmp_path).worlds[0]
    with pytest.raises(ScenarioError, match=r"spans 1,000 days, more than 69: take .* speedup = 1000 where"):
        variant.arrivals(1)


def test_a_tenant_that_is_given_is_every_requests_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("time,tenant\n1,a\n2,\n3,b\n", "utf-8")
    (plain, given) = of(
        "[traffic]\nfile='some.csv'\n[[variant]]\nname='a'\n[[variant]]\nname='b'\ntraffic.tenant='x'", tmp_path
    ).worlds
    assert [one.tenant_id for one in plain.arrivals(1)] == ["a", "tenant", "b"]
    assert [one.tenant_id for one in given.arrivals(1)] == ["x", "x", "x"]


def test_prompts_of_two_files_have_nothing_in_common_and_those_of_one_all(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}\n'
    (tmp_path / "a").write_text(line, "utf-8")
    (tmp_path / "b").write_text(line, "utf-8")
    variant = of("[[traffic]]\nfile='a'\n[[traffic]]\nfile='b'\n[[traffic]]\nfile='a'", tmp_path).worlds[0]
    first, second, third = (one.blocks for one in variant.arrivals(1))
    assert first == third
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "^model: 'config.json' does not say a size"),
        ('{"num_hidden_layers": -5}', "^model: .* cannot be read: .* 'num_hidden_layers' is -5"),
        ("[" * 5000, "^model: .* cannot be read: "),
        (" " * 17_000_000, "^model: .*config.json has more than 16,777,216 bytes"),
    ],
)
def test_a_models_file_that_says_too_little_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "config.json").write_text(content, "utf-8")
    with pytest.raises(ScenarioError, match=told):
        of("model = 'config.json'\n[hardware]\ngpu_type = 'h100'", tmp_path)


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x05\x06" + bytes(18)])
def test_rates_that_are_none_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "servegen_rates_10min.npz").write_bytes(content)
    with pytest.raises(ScenarioError, match=r"^traces: .* cannot be read \(it is not what it should be: "):
        of("level = 'fleet'\ntraces = '.'", tmp_path)


def test_rates_that_unpack_to_more_than_memory_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "servegen_rates_10min.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rate.npy", bytes(300 * 1024 * 1024))
    with pytest.raises(ScenarioError, match="it unpacks to more than 268,435,456 bytes"):
        of("level = 'fleet'\ntraces = '.'", tmp_path)


@pytest.mark.parametrize("knows_kv", ["true", "false"])
@pytest.mark.parametrize("tokens", [2031, 2032, 2047, 2048, 2049])
def test_a_prompt_that_all_but_fills_the_cache_is_answered_or_refused(tokens: int, knows_kv: str) -> None:
    text = f"""
        routing.knows_kv = {knows_kv}
        hardware.gpu_type = "x"
        engine = {{kv_tokens = 2048, speed = {{step_s = 0.01}}}}
        traffic = {{input_tokens = "{tokens}", minutes = 0.1}}
        """
    if knows_kv == "false" and tokens >= 2048:
        with pytest.raises(ScenarioError, match="without knows_kv it blocks its engine"):
            run(of(text))
        return
    figures = run(of(text)).tried[0].runs[0].figures
    assert figures["done"] == (1.0 if tokens < 2048 else 0.0)
    assert figures["done"] + figures["refused"] == 1.0


def test_nodes_that_hold_none_of_the_models_are_told() -> None:
    small = of("""
        level = "fleet"
        hours = 0.2
        traffic.endpoints = 20
        measures.quantised = false
        [[nodes]]
        kind = "t4"
        count = 2
        accelerators = 1
        """)
    with pytest.raises(ScenarioError, match=r"nodes: of 'figures', no node has the accelerators for .* in 16 bits;"):
        run(small)
