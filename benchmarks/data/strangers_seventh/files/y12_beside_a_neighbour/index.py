"""A search index that lives in RAM while the server runs."""
import sys
import time

import numpy as np

rows = int(sys.argv[1])
index = np.ones((rows, 1024), dtype=np.float32)
print("index of", index.nbytes >> 20, "MiB is loaded", flush=True)
time.sleep(600)
