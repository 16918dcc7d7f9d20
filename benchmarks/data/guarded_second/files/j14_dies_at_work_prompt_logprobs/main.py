from perplexity import Scorer


def main():
    scorer = Scorer("./judge")
    scorer.load()
    document = [11 + (7 * n) % 2000 for n in range(28_000)]
    print("warm", scorer.score(document[:50])[0])
    count, total = scorer.score(document)
    print("scored", count, total < 0)
    for name, value in scorer.facts().items():
        print("VALUE", name, value)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
