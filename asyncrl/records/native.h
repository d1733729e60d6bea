// What the files of the extension share: the layout (records/layout.py), and what an answer means.

#pragma once

#define PY_SSIZE_T_CLEAN
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL asyncrl_records_numpy
#ifndef ASYNCRL_MODULE
#define NO_IMPORT_ARRAY
#endif
#include <Python.h>
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <string.h>

#if !defined(__x86_64__)
#error "the layout is little-endian and the order of stores is x86-64's"
#endif

enum { ROWS = 1, TOKENS = 2, ROW_BYTES = 3, BYTES = 4 };              // axes
enum { S_LENGTHS = 1, S_MEMBERS = 2, S_TOKENS = 3 };                  // sections
enum { KNOWN = 20, USER = 0x8000, USER_END = 0x10000, CODES = 10 };   // section ids below, and dtype codes below
enum { FIELDS = 16, PARTS = 64, MEMBERS = 1024 };                     // records beyond these take the way through Python
enum { MAGIC = 0x31525241, VERSION = 1 };

typedef struct {
  uint32_t magic;
  uint16_t version, oldest, header_bytes, entry_bytes;
  uint32_t sections;
  uint64_t record_bytes;
  uint32_t crc, unused[2], members, group_size, zero;
  uint64_t sequence;
  int64_t epoch, group, policy_version;
  uint64_t tokens;
  char producer[16];
  uint64_t written_ns;
  char zeros[16];
} Header;

typedef struct {
  uint16_t section;
  uint8_t code, axis;
  uint16_t flags, zero;
  uint32_t inner[2];
  uint64_t offset, bytes;
} Entry;

_Static_assert(sizeof(Header) == 128 && sizeof(Entry) == 32, "the record's fixed sizes are part of the format");

typedef struct {
  int axis, inner, code, codes;  // `code`: what a writer makes; `codes`: the bits of what a reader takes; axis 0: no such section
  PyObject *spec;
} Form;

// A dataclass with slots: where each field lies in its instances.
typedef struct {
  PyTypeObject *type;
  Py_ssize_t count, offset[FIELDS];
} Shape;

extern Form asyncrl_forms[KNOWN];
extern PyArray_Descr *asyncrl_dtypes[CODES];
extern PyObject *asyncrl_crc32;

int asyncrl_learn(Shape *shape, PyObject *type, const char *fields);
PyObject *asyncrl_unusual(void);
int asyncrl_int64(PyObject *number, int64_t *value);
int asyncrl_crc(PyObject *stolen, uint32_t *crc);
int asyncrl_hit(PyObject *fault, const char *where);
PyObject *asyncrl_write_into(PyObject *plan, char *into, Py_ssize_t room, int64_t sequence, PyObject *fault, uint64_t *written);
PyObject *asyncrl_read_view(PyObject *view, PyObject *sequence);

PyObject *asyncrl_set_plan(PyObject *, PyObject *);
PyObject *asyncrl_plan(PyObject *, PyObject *);
PyObject *asyncrl_write(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *asyncrl_set_record(PyObject *, PyObject *);
PyObject *asyncrl_read(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *asyncrl_rows(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *asyncrl_whole(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *asyncrl_set_ring(PyObject *, PyObject *);
PyObject *asyncrl_publish(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *asyncrl_take(PyObject *, PyObject *const *, Py_ssize_t);

static inline PyObject **field_of(const Shape *shape, PyObject *object, Py_ssize_t i) {
  return (PyObject **)((char *)object + shape->offset[i]);
}

static inline uint64_t aligned(uint64_t offset) { return (offset + 63) & ~(uint64_t)63; }

static inline const Form *form_of(long section) {
  return section > 0 && section < KNOWN && asyncrl_forms[section].axis ? &asyncrl_forms[section] : NULL;
}

// An array as numpy.ndarray itself, in native order, of `type`, without gaps.
static inline int plain(PyObject *object, int type) {
  return PyArray_CheckExact(object) && PyArray_TYPE((PyArrayObject *)object) == type &&
         PyArray_ISNOTSWAPPED((PyArrayObject *)object) && PyArray_IS_C_CONTIGUOUS((PyArrayObject *)object);
}
