"""Sinks that cannot work are refused at the start, in one line with the fix."""

import sys
from pathlib import Path

import pytest
from tests.conformance.backends import open_fresh

from modelyard import compose
from modelyard.clock import SystemClock
from modelyard.config import Config, DataDirectory, load
from modelyard.config.books import KafkaConfig, StripeConfig
from modelyard.control.books import Books
from modelyard.domain.billing import Account, AuditEntry, BillingPlan
from modelyard.domain.tenants import Tenant
from modelyard.errors import StartupError
from modelyard.stores.sql import SqlBillingStore, SqlControlStore

STRIPE = Config(stripe=StripeConfig(enabled=True))
KAFKA = Config(kafka=KafkaConfig(brokers=("127.0.0.1:1",)))


async def books_of(folder: Path, config: Config) -> Books:
    data = DataDirectory(folder)
    data.create()
    database = open_fresh("sqlite", folder)
    try:
        return compose._books(config, data, database, SystemClock())
    finally:
        await database.close()


async def test_without_settings_there_are_no_sinks(tmp_path: Path) -> None:
    books = await books_of(tmp_path, Config())
    assert books.statuses() == []
    assert books.runs() == []
    assert books.needed("gateway-0") is None, "no journal is kept for anybody"


@pytest.mark.parametrize(
    ("config", "package", "extra"), [(STRIPE, "stripe", "stripe"), (KAFKA, "confluent_kafka", "kafka")]
)
async def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StartupError, match=rf"modelyard\[{extra}\]"):
        await books_of(tmp_path, config)


@pytest.mark.parametrize("options", [{"no.such.option": "1"}, {"security.protocol": "smoke signals"}])
async def test_an_option_that_kafka_does_not_know_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    config = Config(kafka=KafkaConfig(brokers=("127.0.0.1:1",), options=options))
    with pytest.raises(StartupError, match=rf"kafka.options.*{next(iter(options))}"):
        await books_of(tmp_path, config)


async def test_a_missing_key_is_said_with_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRIPE_API_KEY", raising=False)
    with pytest.raises(StartupError, match=r"STRIPE_API_KEY.*secrets/stripe"):
        await books_of(tmp_path, STRIPE)


@pytest.mark.parametrize("place", ["environment", "file"])
async def test_the_key_comes_from_the_environment_or_the_file_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("STRIPE_API_KEY", raising=False)
    if place == "environment":
        monkeypatch.setenv("STRIPE_API_KEY", "sk_test_secret")
    else:
        DataDirectory(tmp_path).create()
        (tmp_path / "secrets" / "stripe").write_text("sk_test_secret\n")
    books = await books_of(tmp_path, STRIPE)
    assert books.stripe is not None
    assert "sk_test_secret" not in repr(books)
    await books.stripe.meters.close()


async def test_journals_wait_for_kafka_until_it_is_known_what_it_has(tmp_path: Path) -> None:
    books = await books_of(tmp_path, KAFKA)
    assert books.needed("gateway-0") == ""


def test_passwords_of_kafka_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "modelyard.toml"
    file.write_text('[kafka]\nbrokers = ["b:9092"]\n[kafka.options]\n"sasl.password" = "hunter2"\n')
    config = load(file, {})
    assert config.kafka.options == {"sasl.password": "hunter2"}
    assert "hunter2" not in repr(config)


async def test_one_customer_of_two_tenants_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an event of one of them arrived could never be told from Stripe's summary."""
    monkeypatch.setenv("STRIPE_API_KEY", "sk_test_x")
    config = Config(stripe=StripeConfig(enabled=True, customers={"ten-a": "cus_1", "ten-b": "cus_1"}))
    with pytest.raises(StartupError, match=r"stripe\.customers: two tenants"):
        await books_of(tmp_path, config)


async def test_tenants_that_pay_in_advance_are_spared_by_stripe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", "sk_test_x")
    data = DataDirectory(tmp_path)
    data.create()
    database = open_fresh("sqlite", tmp_path)
    control, billing = SqlControlStore(database), SqlBillingStore(database)
    for plan in BillingPlan:
        await control.add_tenant(Tenant(f"ten-{plan.value}", plan.value, 1))
        await billing.put_account(Account(f"ten-{plan.value}", plan), AuditEntry(1.0, "", "", "", ""), now=1.0)
    reports = compose._stripe_reports(STRIPE, data, database, SystemClock())
    assert reports._spared is not None
    assert set(await reports._spared()) == {"ten-free", "ten-prepaid"}
    await reports.meters.close()
    await database.close()
