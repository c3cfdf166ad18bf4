"""A child process works for its parent, which has begun before it. No torch."""

import multiprocessing as mp

import otel_ddp


def do_work(numbers: range, run: otel_ddp.Run) -> None:
    for number in numbers:
        print(number * number)
        run.log({"square": number * number})


if __name__ == "__main__":
    run = otel_ddp.init(group="share")
    child = mp.Process(target=do_work, args=(range(1, 5), run))
    child.start()
    child.join()
