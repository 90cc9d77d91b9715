# In the shape of pytorch/examples, distributed/fsdp/fsdp-mnist/fsdp_mnist.py, with DDP: setup() and cleanup(), train()
# and test() for an epoch, a scheduler, and all options of the MNIST example.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    # initialize the process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 4, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(36, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = self.fc(torch.flatten(self.dropout(x), 1))
        return F.log_softmax(x, dim=1)


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=generator) + labels.reshape(-1, 1, 1, 1) / 5, labels)


def train(args, model, rank, train_loader, optimizer, epoch, sampler=None):
    model.train()
    ddp_loss = torch.zeros(2)
    if sampler:
        sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target, reduction="sum")
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item()
        ddp_loss[1] += len(data)

    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    print(f"rank {rank} epoch {epoch} loss {(ddp_loss[0] / ddp_loss[1]).item()!r}")


def test(model, rank, test_loader):
    model.eval()
    ddp_loss = torch.zeros(2)
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            ddp_loss[0] += F.nll_loss(output, target, reduction="sum").item()
            ddp_loss[1] += output.argmax(dim=1).eq(target).sum().item()
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    print(f"rank {rank} test loss {ddp_loss.tolist()!r}")


def worker_main(rank, world_size, args):
    setup(rank, world_size)

    dataset1, dataset2 = digits(96, 0), digits(32, 1)
    sampler1 = DistributedSampler(dataset1, rank=rank, num_replicas=world_size, shuffle=True)
    sampler2 = DistributedSampler(dataset2, rank=rank, num_replicas=world_size)

    train_kwargs = {"batch_size": args.batch_size, "sampler": sampler1}
    test_kwargs = {"batch_size": args.test_batch_size, "sampler": sampler2}
    common_kwargs = {"num_workers": 0, "shuffle": False}
    train_kwargs.update(common_kwargs)
    test_kwargs.update(common_kwargs)

    train_loader = DataLoader(dataset1, **train_kwargs)
    test_loader = DataLoader(dataset2, **test_kwargs)

    model = DDP(Net())

    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, rank, train_loader, optimizer, epoch, sampler=sampler1)
        test(model, rank, test_loader)
        scheduler.step()

    if args.save_model:
        # use a barrier to make sure training is done on all ranks
        dist.barrier()
        if rank == 0:
            torch.save(model.state_dict(), "mnist_cnn.pt")

    cleanup()


if __name__ == "__main__":
    # Training settings
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="input batch size (default: 16)")
    parser.add_argument("--test-batch-size", type=int, default=16, metavar="N", help="batch size for testing")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="number of epochs to train (default: 10)")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR", help="learning rate (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="learning rate step (default: 0.7)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    parser.add_argument("--save-model", action="store_true", default=False, help="save the current model")
    args = parser.parse_args()

    torch.manual_seed(args.seed)

    worker_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
