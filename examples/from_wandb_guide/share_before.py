"""A child process works for its parent, which has begun before it. No torch."""

import multiprocessing as mp


def do_work(numbers: range) -> None:
    for number in numbers:
        print(number * number)


if __name__ == "__main__":
    child = mp.Process(target=do_work, args=(range(1, 5),))
    child.start()
    child.join()
