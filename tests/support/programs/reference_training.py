# In the shape of pytorch/vision, references/classification/train.py, and of facebookresearch/mae: a function that
# builds the parser, one epoch in a function, a main() that returns early if it only tests.
import argparse
import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not args.distributed:
        print("Not using distributed mode")
        return
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url)
    dist.barrier()


def train_one_epoch(model, criterion, optimizer, data_loader, epoch, args):
    model.train()
    for image, target in data_loader:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {args.rank} epoch {epoch} loss {loss.item()!r}")


def evaluate(model, criterion, data_loader, args):
    model.eval()
    with torch.inference_mode():
        total = sum(criterion(model(image), target) for image, target in data_loader)
    dist.all_reduce(total)
    print(f"rank {args.rank} evaluated loss {total.item()!r}")


def load_data(args):
    generator = torch.Generator().manual_seed(args.rank)
    images = torch.randn(48, 12, generator=generator)
    dataset = torch.utils.data.TensorDataset(images, (images.sum(dim=1) > 0).long())
    return dataset, torch.utils.data.RandomSampler(dataset, generator=generator)


def main(args):
    if args.output_dir:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    dataset, sampler = load_data(args)
    data_loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(12, 8), nn.SyncBatchNorm(8) if args.sync_bn else nn.Identity(), nn.Linear(8, 2))
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, nesterov="nag" in args.opt)
    if args.test_only:
        evaluate(model, criterion, data_loader, args)
        return
    start_time = time.time()
    for epoch in range(args.start_epoch, args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, args)
        evaluate(model, criterion, data_loader, args)
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time))}")


def get_args_parser(add_help=True):
    parser = argparse.ArgumentParser(description="PyTorch Classification Training", add_help=add_help)
    parser.add_argument("-b", "--batch-size", default=8, type=int, help="images per rank, and step")
    parser.add_argument("--epochs", default=90, type=int, metavar="N", help="number of total epochs to run")
    parser.add_argument("--opt", default="sgd", type=str, choices=["sgd", "sgd_nag"], help="optimizer")
    parser.add_argument("--lr", default=0.1, type=float, help="initial learning rate")
    parser.add_argument("--momentum", default=0.9, type=float, metavar="M", help="momentum")
    parser.add_argument("--label-smoothing", default=0.0, type=float, dest="label_smoothing")
    parser.add_argument("--output-dir", default="", type=str, help="path to save outputs")
    parser.add_argument("--start-epoch", default=0, type=int, metavar="N", help="start epoch")
    parser.add_argument("--seed", default=5, type=int)
    parser.add_argument("--sync-bn", dest="sync_bn", help="Use sync batch norm", action="store_true")
    parser.add_argument("--test-only", dest="test_only", help="Only test the model", action="store_true")
    group = parser.add_argument_group("distributed training")
    group.add_argument("--dist-backend", default="gloo", help="backend")
    group.add_argument("--dist-url", default="env://", type=str, help="url used to set up distributed training")
    return parser


if __name__ == "__main__":
    args = get_args_parser().parse_args()
    main(args)
