"""Direct calls or one executor's thread, beside a thread that is like the event loop (20 us of Python, a send)."""
import sys, threading, socket, time
sys.path.insert(0, "/work/gpu/schema")
sys.argv = ["x"]
exec(open("/work/gpu/schema/masks.py").read().split("for _ in range(2)")[0])
sys.setswitchinterval(0.0005)
a, b = socket.socketpair(); a.setblocking(False); b.setblocking(False)
stop = False; sent = [0]
def loop():
    while not stop:
        x = 0
        for i in range(400): x += i
        try: a.send(b"x" * 200)
        except BlockingIOError:
            try:
                while True: b.recv(65536)
            except BlockingIOError: pass
        sent[0] += 1
for beside in (False, True):
    stop = False
    if beside: t = threading.Thread(target=loop, daemon=True); t.start()
    for how in (0, 1, 0, 1):
        s0, t0 = sent[0], time.perf_counter(); play(how, steps=40); dt = time.perf_counter() - t0
        print("   beside" if beside else "   alone", f"sends/s {(sent[0]-s0)/dt:.0f}")
    stop = True
