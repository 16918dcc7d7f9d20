import argparse

from captioner.engine import caption


def main():
    parser = argparse.ArgumentParser(prog="captioner")
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", type=int, default=28)
    args = parser.parse_args()
    lengths = caption(args.model, args.size)
    print("HEALTHY50-DONE", lengths, flush=True)


if __name__ == "__main__":
    main()
