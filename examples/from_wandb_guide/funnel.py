"""Workers put what they measure into a queue, and their parent takes it out. No torch."""

import multiprocessing as mp
from multiprocessing.queues import Queue

import otel_ddp

WORKERS, STEPS = 3, 20


def do_work(number: int, queue: Queue) -> None:
    for step in range(STEPS):
        queue.put((number, {"loss": number / (step + 1)}))


if __name__ == "__main__":
    run = otel_ddp.init(group="funnel", job_type="parent")
    queue = mp.Queue()
    workers = [mp.Process(target=do_work, args=(number, queue)) for number in range(1, WORKERS + 1)]
    for worker in workers:
        worker.start()
    last = {}
    for _ in range(WORKERS * STEPS):
        number, values = queue.get()
        run.log({f"worker-{number}/{name}": value for name, value in values.items()})
        last[number] = values
    for worker in workers:
        worker.join()
    print(sorted(last.items()))
