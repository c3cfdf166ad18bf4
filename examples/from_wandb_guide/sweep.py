"""A sweep in a pool: each task tries one learning rate. No torch."""

import multiprocessing as mp

import otel_ddp


def do_work(lr: float) -> float:
    run = otel_ddp.init(group="sweep", config={"lr": lr})
    position = 10.0
    for _ in range(50):
        position -= lr * 2 * position
        run.log({"loss": position**2})
    return position**2


if __name__ == "__main__":
    with mp.Pool(processes=2) as pool:
        print(pool.map(do_work, [0.01, 0.03, 0.1, 0.3], chunksize=1))
