"""`graphrt serve`, with what the worker's thread and the device do in a step told, and begun anew, when the file
$PARTS_ASK appears (with "marks" in it: the device's parts from now on too): the table is then in the file $PARTS_TOLD. (Signals were tried: they did not come every time.)
wall - CPU - waited is time in which the thread could not go on: another one had the interpreter, or it waited for the
driver. Of the device (GPU only): reads (the step's graph), between (what waits between that and its choice, uploads of
masks too), choice (its inputs and its graph), answer and inputs (from there to the next step's graph)."""
import os, sys, threading, time
from collections import deque

spent, loop = {}, {}
marks = deque(maxlen=4000)  # of a step: events before reads, behind them, before the choice, behind it
marking = [False]  # only for loads that ask: four events a step cost some microseconds


def timed(owner, name, label=None):
    f = getattr(owner, name)
    label = label or name

    def inner(*a, **k):
        t, c = time.perf_counter(), time.thread_time()
        try:
            return f(*a, **k)
        finally:
            s = spent.setdefault(label, [0, 0.0, 0.0])
            s[0] += 1
            s[1] += time.perf_counter() - t
            s[2] += time.thread_time() - c

    setattr(owner, name, inner)


def marked(cb, step_chosen):
    """Events of the device around a step's two graphs."""
    import torch

    if not torch.cuda.is_available():
        return

    def now():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    run, choose, chooser = cb.ContinuousBatch._run, cb.ContinuousBatch._choose, step_chosen.Chooser.choose

    def _run(self, queued):
        if not marking[0]:
            return run(self, queued)
        queued.marks = [now()]
        run(self, queued)
        queued.marks.append(now())

    def _choose(self, queued):
        if not hasattr(queued, "marks"):
            return choose(self, queued)
        current[:] = [queued]
        choose(self, queued)
        current.clear()
        marks.append((len(queued.reads), sum(r.n for r in queued.reads), queued.marks))

    def _chosen(self, rows):
        if current:
            current[0].marks.append(now())
        chooser(self, rows)
        if current:
            current[0].marks.append(now())

    current = []
    cb.ContinuousBatch._run, cb.ContinuousBatch._choose, step_chosen.Chooser.choose = _run, _choose, _chosen


def install():
    from graphrt.models import batch_reads, continuous_batch as cb, grammar, sampling_device, step_chosen, step_paged
    from graphrt.tools.serve import metrics, scheduler, worker
    marked(cb, step_chosen)
    for name in ("_written", "_choose", "_run", "_taken", "_allow"):
        timed(cb.ContinuousBatch, name)
    timed(batch_reads.ReadPlan, "next", "plan.next")
    timed(step_paged.PagedStep, "write", "PagedStep.write")
    timed(step_chosen.Chooser, "choose", "Chooser.choose")
    timed(sampling_device, "masks_of")
    timed(grammar.GrammarMatcher, "accept", "grammar accept")
    timed(scheduler.Scheduler, "_admit")
    timed(scheduler.Scheduler, "_step_batch")
    timed(metrics.Metrics, "tell", "metrics.tell")
    timed(worker.Worker, "_turn", "TURN")
    timed(cb.ContinuousBatch, "step", "batch.step")
    turn = worker.Worker._turn

    def counted(self, *a):
        turn(self, *a)
        times = self.scheduler.times if self.scheduler else []
        if times:
            for key, each in (("waited for the device", "waited"), ("device", "device")):
                s = spent.setdefault(key, [0, 0.0, 0.0])
                s[0] += len(times)
                s[1] += sum(getattr(t, each) for t in times)
            s = spent.setdefault("tokens read", [0, 0.0, 0.0])
            s[0] += sum(t.n_tokens for t in times)

    worker.Worker._turn = counted
    deliver = worker.Worker._deliver

    def delivered(self, *a):
        t, c = time.perf_counter(), time.thread_time()
        loop.setdefault("begun", c)
        deliver(self, *a)
        s = spent.setdefault("deliver (loop)", [0, 0.0, 0.0])
        s[0] += 1
        s[1] += time.perf_counter() - t
        s[2] += time.thread_time() - c
        loop["end"] = time.thread_time()

    worker.Worker._deliver = delivered
    threading.Thread(target=answer, daemon=True).start()


def mean(values):
    return sum(values) / len(values) if values else 0.0


def of_device():
    """Mean and median ms of steps whose reads are all single tokens, and of others."""
    steps = [(n, tokens, each) for n, tokens, each in list(marks) if len(each) == 4]
    if not steps:
        return []
    steps[-1][2][-1].synchronize()
    rows = {"single": [], "prompts": []}
    for (n, tokens, each), after in zip(steps, [*steps[1:], None]):
        parts = [a.elapsed_time(b) for a, b in zip(each, each[1:])]
        nxt = each[3].elapsed_time(after[2][0]) if after else 0.0
        # a step that was queued before this one's choice begins its inputs behind it: what is negative says nothing
        rows["single" if tokens == n else "prompts"].append((*parts, nxt))
    out = []
    for kind, each in rows.items():
        if each:
            columns = list(zip(*each))
            told = "  ".join(
                f"{name} {mean(c):.3f} p50 {sorted(c)[len(c) // 2]:.3f}"
                for name, c in zip(("reads", "between", "choice", "to the next"), columns)
            )
            out.append(f"  device, {len(each)} steps of {kind} tokens, ms: {told}")
    return out


def told():
    parts = dict(spent)
    n = max(1, parts.get("device", [1])[0])
    out = [f"PARTS of {n} steps, ms a step: wall / CPU"]
    for key, (k, wall, cpu) in sorted(parts.items(), key=lambda e: -e[1][1]):
        out.append(f"  {key:24s} x{k / n:6.2f}  {1e3 * wall / n:7.3f} / {1e3 * cpu / n:7.3f}")
    if "end" in loop and "begun" in loop:
        out.append(f"  the event loop's CPU, all of it: {1e3 * (loop['end'] - loop['begun']) / n:.3f} ms a step")
    return "\n".join(out + of_device())


def answer():
    ask, to = os.environ["PARTS_ASK"], os.environ["PARTS_TOLD"]
    while True:
        time.sleep(0.02)
        if os.path.exists(ask):
            try:
                text = told()
            except (RuntimeError, KeyError, ValueError) as error:
                text = f"PARTS failed: {error!r}"
            spent.clear(), loop.clear(), marks.clear()
            with open(ask) as file:
                marking[0] = file.read() == "marks"
            with open(to + ".new", "w") as file:
                file.write(text + "\n")
            os.remove(ask)
            os.replace(to + ".new", to)


if __name__ == "__main__":
    import graphrt.tools.serve.run  # noqa: F401
    install()
    from graphrt.__main__ import main
    sys.exit(main())
