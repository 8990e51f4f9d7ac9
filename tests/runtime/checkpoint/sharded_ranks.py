"""What the processes of `test_sharded` run: a training whose gradients are known, on weights in shards."""

import pathlib
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

from roundpipe_runtime import CheckpointError, RoundPipe, list_checkpoints, load_checkpoint, save_checkpoint
from roundpipe_runtime.checkpoint import training_state
from roundpipe_runtime.checkpoint.shards import cut_like, is_sharded


class Training:
    """A training that draws its gradients, so that it is the same on any number of processes."""

    def __init__(self, mesh=None):
        torch.manual_seed(0)
        # of two rows: on three processes, one has none
        self.model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2), nn.BatchNorm1d(2))
        if mesh is not None:
            shard(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.step = 0

    def go_on(self, steps):
        """Take steps, and leave the gradients of the next one."""
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()
            self.scheduler.step()
            self.model[2].num_batches_tracked += 1
            self.step += 1
        self.gradients()

    def gradients(self):
        generator = torch.Generator().manual_seed(self.step)
        for parameter in self.model.parameters():
            parameter.grad = cut_like(torch.randn(parameter.shape, generator=generator), parameter)

    def parts(self):
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, folder, **options):
        return save_checkpoint(folder, self.model, **self.parts(), data={"step": self.step}, **options)

    def load(self, folder):
        data = load_checkpoint(folder, self.model, **self.parts())
        self.step = 0 if data is None else data["step"]
        return data

    def state(self):
        found = dict(self.model.state_dict(keep_vars=True))
        for name, parameter in self.model.named_parameters():
            found[f"{name}.grad"] = parameter.grad
            found.update({f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()})
        return found

    def is_as_never_stopped(self):
        """Compare with a training of whole tensors in one process that was never stopped, bitwise."""
        wanted = Training()
        wanted.go_on(self.step)
        expected, found = wanted.state(), self.state()
        assert list(found) == list(expected)
        assert self.scheduler.state_dict() == wanted.scheduler.state_dict()
        return all(torch.equal(local(found[name]), local(cut_like(expected[name], found[name]))) for name in found)


def local(tensor):
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard(model, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            place = Shard(0) if parameter.dim() > 1 else Replicate()
            module._parameters[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [place]))


def mesh():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def pipeline(**options):
    """A pipeline that has as many groups as ranks, unless it is given their number, or loads it."""
    return RoundPipe(nn.Sequential(nn.Linear(4, 3)), devices="virtual:1", name="groups", **options)


def groups_after(folder):
    model = pipeline(mesh=mesh())
    load_checkpoint(folder, model)
    model.close()
    return model.replicas


def two(home):
    """Two processes go on with what one has saved; each step is saved in the background."""
    home = pathlib.Path(home)
    training = Training(mesh())
    found = {"nothing there": training.load(home / "two")}
    found["loaded"] = training.load(home / "one")
    found["same"] = training.is_as_never_stopped()
    for _ in range(3):
        training.go_on(1)
        checkpoint = training.save(home / "two", keep=2, is_async=True)
        training.model[0].weight.detach().to_local().mul_(1)  # it was copied
    checkpoint.wait()
    found["then"] = training.is_as_never_stopped()
    dist.barrier()  # the last folder is there once all have waited
    found["kept"] = [checkpoint.path.name for checkpoint in list_checkpoints(home / "two")]
    found["failed"] = failing(training, home / "two")
    found["failed to load"] = failing_to_load(training, home / "one")
    found["groups"] = groups_after(home / "groups")
    return found


def error_of(call):
    try:
        call()
    except (CheckpointError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def failing(training, folder):
    """The second process cannot write: all raise, and nothing is left of it."""
    before = sorted(path.name for path in folder.iterdir())
    write = training_state.write_tensors

    def full(*arguments):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        write(*arguments)

    training_state.write_tensors = full
    error = error_of(lambda: training.save(folder))
    training_state.write_tensors = write
    dist.barrier()
    return error, sorted(path.name for path in folder.iterdir()) == before


def failing_to_load(training, folder):
    """The scheduler of the second process cannot be loaded, after its optimizer was: all raise, nothing is changed."""
    before = {name: local(value).clone() for name, value in training.state().items()}
    rates = training.scheduler.state_dict()

    def refuse(state):
        raise ValueError("a bad scheduler")

    if dist.get_rank() == 1:
        training.scheduler.load_state_dict = refuse
    begin = time.monotonic()
    error = error_of(lambda: training.load(folder))
    seconds = time.monotonic() - begin
    training.scheduler.__dict__.pop("load_state_dict", None)
    now = training.state()
    same = list(now) == list(before) and all(torch.equal(local(now[name]), before[name]) for name in before)
    return error, seconds < 1, same and training.scheduler.state_dict() == rates


def three(home):
    """Three processes go on with what two have saved, and save."""
    home = pathlib.Path(home)
    training = Training(mesh())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        data = training.load(home / "two")
        found = {"loaded": data, "same": training.is_as_never_stopped(), "warned": [str(one.message) for one in warned]}
    training.go_on(1)
    training.save(home / "three")
    found["then"] = training.is_as_never_stopped()
    return found
