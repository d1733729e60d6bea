// A record with its descriptor, in a slot of a ring: what RingWriter and RingReader of transport/rings/ring.py say in Python, and the
// one place here that knows of rings. The words are stored one by one in the order that is written there: each store may be the
// last one before a kill, and on x86-64 nobody sees a later one before an earlier one.

#include "native.h"

enum { SEQUENCES, RELEASED, OFFSETS, SIZES, CHECKS, ARRAYS_N };  // of words, `slots` each

static Py_ssize_t head_at, state_at, arrays_at;

typedef struct {
  Py_buffer block;
  uint64_t *head, *state, *arrays, slots, slot;
  char *payload;
  uint64_t room;  // bytes of the payload
} Ring;

// set_ring(head, state, arrays): byte offsets of the words in a ring's block.
PyObject *asyncrl_set_ring(PyObject *self, PyObject *arguments) {
  if (!PyArg_ParseTuple(arguments, "nnn", &head_at, &state_at, &arrays_at)) return NULL;
  Py_RETURN_NONE;
}

// given: block, slots, payload's offset, slot. 0: unusual, or an error is set; nothing is held then.
static int open_ring(Ring *ring, PyObject *const *given, int flags) {
  int64_t slots, payload, slot;
  if (!arrays_at || !asyncrl_int64(given[1], &slots) || !asyncrl_int64(given[2], &payload) || !asyncrl_int64(given[3], &slot))
    return 0;
  if (PyObject_GetBuffer(given[0], &ring->block, flags | PyBUF_C_CONTIGUOUS) < 0) return 0;
  char *block = ring->block.buf;
  int good = slot >= 0 && slot < slots && slots < (1 << 24) && (uintptr_t)block % 8 == 0 && payload <= ring->block.len &&
             payload >= arrays_at + 8 * ARRAYS_N * slots;
  if (!good) {
    PyBuffer_Release(&ring->block);
    return 0;
  }
  ring->head = (uint64_t *)(block + head_at), ring->state = (uint64_t *)(block + state_at);
  ring->arrays = (uint64_t *)(block + arrays_at), ring->slots = slots, ring->slot = slot;
  ring->payload = block + payload, ring->room = ring->block.len - payload;
  return 1;
}

static uint64_t *word_of(const Ring *ring, int array) { return ring->arrays + array * ring->slots + ring->slot; }

// Once: somebody may write there meanwhile.
static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static int store(uint64_t *word, uint64_t value, const char *before, const char *after, PyObject *fault) {
  if (!asyncrl_hit(fault, before)) return 0;
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  return asyncrl_hit(fault, after);
}

#define STORE(word, value, label) store(word, value, label ":before", label ":after", fault)

static int check_of(uint64_t sequence, uint64_t start, uint64_t size, uint32_t *check) {
  uint64_t words[] = {sequence, start, size};
  return asyncrl_crc(PyBytes_FromStringAndSize((const char *)words, sizeof words), check);
}

// publish(plan, block, slots, payload's offset, slot, start, size, sequence, fault) -> True | None. None: at most the word
// that says what is being written was stored; the Python stores it again.
PyObject *asyncrl_publish(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 9) return PyErr_Format(PyExc_TypeError, "publish: 9 arguments expected, found %zd", count);
  PyObject *fault = given[8], *done = NULL;
  int64_t start, size, sequence;
  uint32_t check;
  Ring ring;
  if (!asyncrl_int64(given[5], &start) || !asyncrl_int64(given[6], &size) || !asyncrl_int64(given[7], &sequence))
    return asyncrl_unusual();
  if (!open_ring(&ring, given + 1, PyBUF_WRITABLE)) return asyncrl_unusual();
  uint64_t written = 0;
  int64_t room = (int64_t)ring.room;
  if (start < 0 || size < 0 || start > room || size > room - start || sequence < 1)
    done = Py_NewRef(Py_None);
  else if (STORE(ring.state + 3, sequence, "ring.state"))
    done = asyncrl_write_into(given[0], ring.payload + start, size, sequence, fault, &written);
  if (done == Py_True) {
    int good = check_of(sequence, start, written, &check) && STORE(word_of(&ring, OFFSETS), start, "ring.offset") &&
               STORE(word_of(&ring, SIZES), written, "ring.size") && STORE(word_of(&ring, CHECKS), check, "ring.check") &&
               STORE(word_of(&ring, SEQUENCES), sequence, "ring.sequence") && STORE(ring.head, sequence, "ring.head");
    if (!good) Py_CLEAR(done);
  }
  PyBuffer_Release(&ring.block);
  return done;
}

// take(block, slots, payload's offset, slot, sequence) -> Record | None
PyObject *asyncrl_take(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 5) return PyErr_Format(PyExc_TypeError, "take: 5 arguments expected, found %zd", count);
  int64_t sequence;
  uint32_t check;
  Ring ring;
  if (!PyMemoryView_Check(given[0]) || !asyncrl_int64(given[4], &sequence) || !open_ring(&ring, given, PyBUF_SIMPLE))
    return asyncrl_unusual();
  uint64_t start = load(word_of(&ring, OFFSETS)), size = load(word_of(&ring, SIZES)), expected = load(word_of(&ring, CHECKS));
  int good = start <= ring.room && size <= ring.room - start;
  Py_ssize_t at = good ? ring.payload + start - (char *)ring.block.buf : 0;
  PyBuffer_Release(&ring.block);
  if (!good || !check_of(sequence, start, size, &check) || check != expected) return asyncrl_unusual();
  PyObject *view = PySequence_GetSlice(given[0], at, at + size);
  PyObject *record = view ? asyncrl_read_view(view, given[4]) : NULL;
  Py_XDECREF(view);
  return record;
}
