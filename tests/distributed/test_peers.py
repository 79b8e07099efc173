"""Peers in one process: they meet at a store, see each other's signs of life, and end together."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from support.process_runs import config, finished, run_alone, same, start

from flow_grpo.distributed import peers as module
from flow_grpo.distributed.peers import PATIENCE, Peers, meet
from flow_grpo.distributed.processes import is_peer_lost
from flow_grpo.errors import FlowGRPOError, PeerLost, RetryableError

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
MET: list[Peers] = []
DIES = """
import os, signal
from pathlib import Path

CALLS = 0


def brightness(images, prompts):
    global CALLS
    CALLS += 1
    file = Path(__file__).with_name("has_died")
    if os.environ.get("RANK") == "1" and CALLS == {call} and not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(image.mean()) for image in images]
"""


@pytest.fixture
def ended(monkeypatch):
    """The statuses with which processes were ended, each of which is a thread here."""
    statuses: list[int] = []

    def end(status):
        statuses.append(status)
        raise SystemExit  # of the thread alone

    monkeypatch.setattr(module, "_exit", end)
    return statuses


@pytest.fixture
def port(monkeypatch, ended):
    with socket.create_server(("localhost", 0)) as server:
        number = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setenv("FLOW_GRPO_PEER_TIMEOUT", "3")
    monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(module, "SOON", 1.5)
    monkeypatch.setattr(module, "GRACE", 0.0)
    yield number
    for peer in MET:
        peer._closed.set()
    MET.clear()
    time.sleep(0.2)


def meet_all(world_size: int) -> list[Peers]:
    with ThreadPoolExecutor(world_size) as pool:
        MET.extend(found := list(pool.map(meet, range(world_size), [world_size] * world_size)))
    return found


def test_an_error_of_one_ends_the_others_with_its_sentence(port):
    first, other = meet_all(2)
    other.tell(ValueError("no paper"))
    until(lambda: first.end)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PeerLost, match=f"rank 1 of 2 on {socket.gethostname()} ended the run: no paper") as lost:
        first.raise_end()
    assert signal.getsignal(signal.SIGTERM) == before, "it is ignored during the wait alone"
    assert not lost.value.prints_error, "the failed rank prints it on this host"
    other.raise_end()  # its own error is raised already


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_peer_is_named_after_the_stated_time(port, ended, capfd, lost):
    """Its threads stand still, as those of a process after SIGSTOP or of a machine without power do."""
    found = meet_all(3)
    began = time.monotonic()
    found[lost]._closed.set()
    alive = [peer for peer in found if peer.rank != lost]
    until(lambda: len(ended) >= 2, seconds=20)
    assert 2 < time.monotonic() - began < 15
    for peer in alive:
        assert peer.end == module.End(lost, None)
        peer._closed.set()
    said = capfd.readouterr().err
    assert said.count("error: ") == 1, "one rank of a host speaks"
    assert (
        f"rank {lost} of 3 on {socket.gethostname()} is gone: no sign of life for 3 s. Go on, when it is back, with: "
        in said
    )


def test_a_peer_that_has_left_is_not_missed(port, ended):
    first, other = meet_all(2)
    other.leave()
    first._limit = 0.5
    time.sleep(2)
    assert first.end is None


def test_a_broken_connection_names_the_lost_peer_soon(port, monkeypatch):
    monkeypatch.setenv("FLOW_GRPO_PEER_TIMEOUT", "300")
    monkeypatch.setattr(module, "SOON", 4.0)  # silence is counted in whole seconds, and rank 2 waits for twice as many
    found = meet_all(3)
    found[1]._closed.set()
    began = time.monotonic()
    assert "rank 1 of 3" in str(found[2].reason())
    assert time.monotonic() - began < 100, "and not after the time of a silent one"


def test_words_of_an_earlier_round_in_the_same_store_do_not_count(port, monkeypatch):
    """As torchrun keeps its store when it starts its processes again."""
    server = torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rounds = []
    for _ in range(2):
        met = meet_all(2)
        met[0].store.set("address", f"of round {len(rounds)}")
        assert met[1].store.get("address") == f"of round {len(rounds)}".encode()
        rounds.append(met)
    del server


def test_an_error_after_the_meeting_is_told_before_the_group_is_joined(port):
    """Which would wait for an hour, as the process group's own store knows nothing of failures."""
    found = meet_all(3)
    found[0].tell(FileNotFoundError("no config"))
    for other in found[1:]:
        with pytest.raises(PeerLost, match=r"rank 0 of 3 on .* ended the run: no config"):
            other.wait_for_all()


def test_all_wait_for_the_last_one(port):
    first, other = meet_all(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait_for_all)
        time.sleep(0.3)
        assert not waiting.done()
        other.wait_for_all()
        waiting.result(5)


def test_an_error_of_rank_0_reaches_other_hosts_before_its_store_ends(port):
    first, other = meet_all(2)
    first.hosts[:] = other.hosts[:] = ["node1", "node2"]
    first.tell(ValueError("no paper"))
    assert other.end == module.End(0, "no paper")


def test_gloo_uses_the_interface_by_which_the_others_reach_rank_0(monkeypatch, port):
    """Rank 0 knows itself by a loopback address, as after Debian's installer; the other rank by one of another interface."""
    machine = {"lo": ["127.0.0.1", "127.0.1.1"], "eth0": ["10.0.0.1"]}
    found = {name: [SimpleNamespace(address=address) for address in its] for name, its in machine.items()}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: found)
    server = torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(module._join_round, server, 1, "10.0.0.1")
        name = module._begin_round(server, 2, "127.0.1.1")
        assert joined.result(5) == name
    assert json.loads(server.get(f"{name}/hosts"))[2] == "10.0.0.1"
    assert module._interface("10.0.0.1") == "eth0"
    assert module._interface("10.0.0.9") is None


def test_another_program_that_has_the_port_and_says_nothing_is_not_waited_for(port, monkeypatch):
    monkeypatch.setenv(PATIENCE, "0.5")
    with (
        socket.create_server(("localhost", port)),
        pytest.raises(RetryableError, match=r"what listens there is no store of torch.*set MASTER_PORT"),
    ):
        meet(1, 2)


def test_the_route_to_this_machine_is_its_own_address():
    assert module._route("127.0.0.1", 29500) == ("127.0.0.1", "127.0.0.1")
    assert module._route("no.such.host.invalid", 29500) == ("", "")


def test_a_peer_that_does_not_come_is_named_by_those_that_did(port, monkeypatch):
    monkeypatch.setenv("FLOW_GRPO_PEER_TIMEOUT", "1")
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, rank, 3) for rank in (0, 2)]
    for attempt in met:
        with pytest.raises(
            RetryableError, match=r"the 3 processes of the run don't meet at localhost:\d+ \(without rank 1 after 1 s"
        ):
            attempt.result()


@pytest.mark.slow
def test_torchrun_restarts_a_killed_worker_to_the_same_metrics(tmp_path):
    for name, call in (("alone", -1), ("killed", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dies.py").write_text(DIES.format(call=call))
    reward = "rewards={{{}/dies.py:brightness: 1}}"
    run_alone(config(tmp_path / "alone", reward.format(tmp_path / "alone")))
    output = finished(start(config(tmp_path / "killed", reward.format(tmp_path / "killed")), 2, launcher=TORCHRUN))
    assert (tmp_path / "killed" / "has_died").exists()
    sentence = f"rank 1 of 2 on {socket.gethostname()} is gone: no sign of life for 10 s. Go on, when it is back, with: "
    assert f"{sentence}the same command and --resume auto" in output, output
    assert "resumed at step " in output
    same(tmp_path / "alone", tmp_path / "killed")


def until(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("given", ["", "abc", "0", "-1", "nan", "inf", "123456789"])
@pytest.mark.parametrize("name", [PATIENCE, "MASTER_PORT"])
def test_a_number_in_the_environment_that_is_none_or_out_of_range_is_one_sentence_at_once(monkeypatch, name, given):
    monkeypatch.setenv(name, given)
    with pytest.raises(FlowGRPOError, match=rf"{name}={given} in the environment should be a number from "):
        meet(0, 2)


def test_an_error_of_a_callbacks_own_network_is_told_to_the_peers_as_it_is():
    with pytest.raises(RuntimeError) as of_a_callback:
        raise RuntimeError("Connection refused by the tracking server")
    assert not is_peer_lost(of_a_callback.value)
    with pytest.raises(RuntimeError) as of_torch:
        exec(compile("raise RuntimeError('Connection closed by peer')", torch.distributed.__file__, "exec"))
    assert is_peer_lost(of_torch.value)
