"""A sweep in a pool: each task tries one learning rate. No torch."""

import multiprocessing as mp


def do_work(lr: float) -> float:
    position = 10.0
    for _ in range(50):
        position -= lr * 2 * position
    return position**2


if __name__ == "__main__":
    with mp.Pool(processes=2) as pool:
        print(pool.map(do_work, [0.01, 0.03, 0.1, 0.3], chunksize=1))
