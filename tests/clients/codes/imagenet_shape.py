"""Train images in the shape of PyTorch's examples/imagenet: no accumulation, a loader with workers, meters."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("data", nargs="?", default="imagenet", help="path to dataset")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int, help="mini-batch size (default: 256)")
parser.add_argument("--dummy", action="store_true")


def main():
    args = parser.parse_args()
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 4))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    data = TensorDataset(torch.randn(640, 3, 32, 32), torch.randint(0, 4, (640,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    for epoch in range(args.epochs):
        model.train()
        end = time.time()
        for i, (images, target) in enumerate(loader):
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Time {time.time() - end:.3f} Loss {loss.item():.4e}")
            end = time.time()
        model.eval()
        with torch.no_grad():
            correct = sum((model(images).argmax(1) == target).sum().item() for images, target in loader)
        print(f" * Acc@1 {100 * correct / len(data):.3f}")
        scheduler.step()
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, "checkpoint.pth.tar")


if __name__ == "__main__":
    main()
