import inspect

import suite


def run(module):
    """A test runner in small: fixtures are generators, tests take them by name."""
    fixtures = {name: value for name, value in vars(module).items() if getattr(value, "is_fixture", False)}
    for name, test in list(vars(module).items()):
        if name.startswith("test_"):
            live = {arg: fixtures[arg]() for arg in inspect.signature(test).parameters}
            test(**{arg: next(generator) for arg, generator in live.items()})
            print("passed", name)
            for generator in live.values():
                next(generator, None)


if __name__ == "__main__":
    run(suite)
    print("INPROC-DONE")
