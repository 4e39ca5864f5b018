"""How a simulated GPU is described, and what a process without one says."""

from __future__ import annotations

import pytest

from trae_mem.errors import ConfigError, TraeMemError
from trae_mem.sim import Settings, activate, active, control
from trae_mem.sim.settings import parse_rate


def as_dict(settings):
    return dict(pair.split("=") for pair in settings.text().split(","))


def test_a_card_gives_its_numbers():
    values = as_dict(Settings("a100-80gb"))
    assert values["gpu"] == "A100-80GB"
    assert int(values["memory"]) == 80 << 30
    assert (values["major"], values["minor"], values["sms"]) == ("8", "0", "108")
    assert (values["mode"], values["devices"], values["poison"]) == ("numeric", "1", "0")
    assert float(values["link"]) == 25e9


def test_what_is_given_wins_over_the_card():
    values = as_dict(Settings(memory="2GiB", link="1.5GB/s", mode="dry", poison=True, delay_us=7))
    assert int(values["memory"]) == 2 << 30
    assert float(values["link"]) == 1.5e9
    assert (values["mode"], values["poison"], values["delay_us"]) == ("dry", "1", "7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "A1000000"}, "unknown card"),
        ({"mode": "wet"}, "numeric and dry"),
        ({"devices": 0}, "devices=0"),
        ({"memory": "many"}, "not a size"),
        ({"link": "25 bananas/s"}, "not a rate"),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**changes).text()


def test_rates():
    assert parse_rate("25GB/s") == parse_rate("25 GB") == parse_rate(25e9) == 25e9
    assert parse_rate(0) == 0
    with pytest.raises(ConfigError, match="negative"):
        parse_rate(-1)


def test_a_process_that_has_torch_cannot_get_one():
    assert not active()
    with pytest.raises(TraeMemError, match="imported already"):
        activate()


def test_a_process_without_one_has_no_control():
    with pytest.raises(TraeMemError, match=r"python -m trae_mem\.sim"):
        control.reports()
