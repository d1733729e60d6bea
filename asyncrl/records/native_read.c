// read() of read.py, and the frozen rows of quick.py.

#include "native.h"

enum { GROUP, EPOCH, GROUP_SIZE, POLICY_VERSION, PRODUCER, SEQUENCE, WRITTEN, WRITER, MEMBERS_N, LENGTHS_N, BOUNDS, ARRAYS,
       STRINGS, SKIPPED };  // fields of Record

static Shape record_shape, last_rows;
static PyObject *to_read_only, *nothing;

PyObject *asyncrl_set_record(PyObject *self, PyObject *type) {
  if (!asyncrl_learn(&record_shape, type,
                     "group epoch group_size policy_version producer sequence written_ns version members lengths bounds arrays "
                     "strings skipped"))
    return NULL;
  Py_XSETREF(to_read_only, PyUnicode_InternFromString("toreadonly"));
  Py_XSETREF(nothing, PyTuple_New(0));
  if (!to_read_only || !nothing) return NULL;
  Py_RETURN_NONE;
}

// A view of `nd` dimensions at `data`, which `base` keeps alive.
static PyObject *view_of(PyArray_Descr *dtype, int nd, npy_intp *dims, void *data, int flags, PyObject *base) {
  Py_INCREF(dtype);
  PyObject *array = PyArray_NewFromDescr(&PyArray_Type, dtype, nd, dims, NULL, data, flags, NULL);
  if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(base)) < 0) Py_CLEAR(array);
  return array;
}

static int put(PyObject *dictionary, long section, PyObject *stolen) {
  PyObject *key = stolen ? PyLong_FromLong(section) : NULL;
  int good = key && PyDict_SetItem(dictionary, key, stolen) == 0;
  Py_XDECREF(key);
  Py_XDECREF(stolen);
  return good;
}

static int good_ends(const char *raw, uint64_t bytes, uint64_t n) {
  int64_t end, last = 0;
  if (bytes < 8 * n) return 0;
  for (uint64_t i = 0; i < n; ++i, last = end) {
    memcpy(&end, raw + 8 * i, 8);
    if (end < last) return 0;
  }
  return last == (int64_t)(bytes - 8 * n);
}

typedef struct {
  PyObject *view, *arrays, *strings, *members, *lengths, *bounds;
  char *data;
  Header header;
  Entry entries[PARTS];
} Found;

// One section into `arrays` or `strings`. 0: unusual, or an error is set.
static int take(Found *found, const Entry *entry) {
  const Header *header = &found->header;
  const Form *form = form_of(entry->section);
  if (entry->bytes > header->record_bytes || entry->offset > header->record_bytes - entry->bytes) return 0;
  if (form ? entry->axis != form->axis || entry->code >= CODES || !(form->codes >> entry->code & 1)
           : entry->section < USER || entry->axis != BYTES)
    return 0;
  char *data = found->data + entry->offset;
  if (entry->axis == BYTES || entry->axis == ROW_BYTES) {
    if (entry->axis == ROW_BYTES && !good_ends(data, entry->bytes, header->members)) return 0;
    PyObject *raw = PySequence_GetSlice(found->view, entry->offset, entry->offset + entry->bytes);
    return put(found->strings, entry->section, raw);
  }
  PyArray_Descr *dtype = asyncrl_dtypes[entry->code];
  npy_intp item = PyDataType_ELSIZE(dtype), first = entry->axis == ROWS ? header->members : header->tokens;
  npy_intp dims[3] = {first, entry->inner[0], entry->inner[1]}, inner = 0, bytes = 0;
  if (first < 0 || __builtin_mul_overflow(dims[1], dims[2], &inner) || __builtin_mul_overflow(first * item, inner, &bytes))
    return 0;
  if (bytes != (npy_intp)entry->bytes || inner > (npy_intp)1 << 40 || entry->offset % item) return 0;
  if ((!form->inner && inner != 1) || (form->inner == 1 && dims[2] != 1)) return 0;  // dimensions that the section has not
  if (entry->section != S_MEMBERS && entry->section != S_LENGTHS)
    return put(found->arrays, entry->section,
               view_of(dtype, 1 + form->inner, dims, data, NPY_ARRAY_CARRAY_RO, found->view));
  // A copy of its own: the numbers that are checked are those that are used, whatever somebody writes there meanwhile.
  PyObject **own = entry->section == S_MEMBERS ? &found->members : &found->lengths;
  Py_INCREF(dtype);
  Py_XSETREF(*own, PyArray_NewFromDescr(&PyArray_Type, dtype, 1, dims, NULL, NULL, 0, NULL));
  if (!*own) return 0;
  memcpy(PyArray_DATA((PyArrayObject *)*own), data, bytes);
  PyArray_CLEARFLAGS((PyArrayObject *)*own, NPY_ARRAY_WRITEABLE);
  return 1;
}

// Members are distinct and below the group size, lengths add up to the tokens. 0: unusual, or an error is set.
static int check_members(Found *found) {
  const Header *header = &found->header;
  uint64_t seen[MEMBERS / 64] = {0}, total = 0, n = header->members;
  if (!found->members || !found->lengths || n < 1 || n > MEMBERS) return 0;
  const int32_t *members = PyArray_DATA((PyArrayObject *)found->members);
  const int32_t *lengths = PyArray_DATA((PyArrayObject *)found->lengths);
  if (!(found->bounds = PyTuple_New(n + 1))) return 0;
  for (uint64_t i = 0; i <= n; ++i) {
    PyObject *bound = PyLong_FromUnsignedLongLong(total);
    if (!bound) return 0;
    PyTuple_SET_ITEM(found->bounds, i, bound);
    if (i == n) break;
    int32_t member = members[i], length = lengths[i];
    if (member < 0 || member >= MEMBERS || (uint32_t)member >= header->group_size || length < 0) return 0;
    if (seen[member / 64] >> (member % 64) & 1) return 0;
    seen[member / 64] |= (uint64_t)1 << (member % 64);
    total += (uint32_t)length;
  }
  return total == header->tokens;
}

static int good_crc(Found *found, uint64_t start) {
  uint32_t crc, given = found->header.crc;
  PyObject *head = PyBytes_FromStringAndSize(NULL, start);
  if (!head) return 0;
  found->header.crc = 0;
  memcpy(PyBytes_AS_STRING(head), &found->header, sizeof(Header));
  memcpy(PyBytes_AS_STRING(head) + sizeof(Header), found->entries, start - sizeof(Header));
  return asyncrl_crc(head, &crc) && crc == given;
}

static PyObject *record_of(Found *found) {
  const Header *header = &found->header;
  PyObject *record = record_shape.type->tp_alloc(record_shape.type, 0);
  PyObject *values[] = {
      PyLong_FromLongLong(header->group),
      PyLong_FromLongLong(header->epoch),
      PyLong_FromUnsignedLong(header->group_size),
      PyLong_FromLongLong(header->policy_version),
      PyBytes_FromStringAndSize(header->producer, 16),
      PyLong_FromUnsignedLongLong(header->sequence),
      PyLong_FromUnsignedLongLong(header->written_ns),
      PyLong_FromLong(header->version),
      Py_NewRef(found->members),
      Py_NewRef(found->lengths),
      Py_NewRef(found->bounds),
      Py_NewRef(found->arrays),
      Py_NewRef(found->strings),
      Py_NewRef(nothing),
  };
  int good = record != NULL;
  for (int i = 0; i <= SKIPPED; ++i) {
    good = good && values[i];
    if (record)
      *field_of(&record_shape, record, i) = values[i];
    else
      Py_XDECREF(values[i]);
  }
  if (!good) Py_CLEAR(record);
  return record;
}

// 1 where `found` is a whole record of version 1 with nothing strange in it.
static int understood(Found *found, Py_ssize_t here, PyObject *expected) {
  Header *header = &found->header;
  int64_t sequence;
  if (here < (Py_ssize_t)sizeof(Header) || (uintptr_t)found->data % 8) return 0;
  memcpy(header, found->data, sizeof(Header));
  uint64_t start = sizeof(Header) + sizeof(Entry) * (uint64_t)header->sections;
  if (header->magic != MAGIC || header->version != VERSION || header->oldest > VERSION || header->sections > PARTS) return 0;
  if (header->header_bytes != sizeof(Header) || header->entry_bytes != sizeof(Entry)) return 0;
  if (start > header->record_bytes || header->record_bytes > (uint64_t)here || header->tokens >> 40) return 0;
  memcpy(found->entries, found->data + sizeof(Header), start - sizeof(Header));
  if (expected != Py_None && (!asyncrl_int64(expected, &sequence) || sequence < 0 || (uint64_t)sequence != header->sequence))
    return 0;
  if (!good_crc(found, start)) return 0;
  if (!(found->arrays = PyDict_New()) || !(found->strings = PyDict_New())) return 0;
  for (uint32_t i = 0; i < header->sections; ++i)
    if (!take(found, &found->entries[i])) return 0;
  if (!check_members(found)) return 0;
  PyObject *key = PyLong_FromLong(S_TOKENS);
  int there = key ? PyDict_Contains(found->arrays, key) : 0;
  Py_XDECREF(key);
  return there == 1;
}

// The record in the memoryview `view`, or None.
PyObject *asyncrl_read_view(PyObject *view, PyObject *sequence) {
  Found found;
  found.arrays = found.strings = found.members = found.lengths = found.bounds = NULL;
  found.view = PyMemoryView_GET_BUFFER(view)->readonly ? Py_NewRef(view) : PyObject_CallMethodNoArgs(view, to_read_only);
  if (!found.view) return NULL;
  Py_buffer *buffer = PyMemoryView_GET_BUFFER(found.view);
  found.data = buffer->buf;
  int plain_bytes = buffer->itemsize == 1 && buffer->ndim == 1 && PyBuffer_IsContiguous(buffer, 'C');
  int good = plain_bytes && understood(&found, buffer->len, sequence);
  PyObject *record = good ? record_of(&found) : asyncrl_unusual();
  PyObject *owned[] = {found.view, found.arrays, found.strings, found.members, found.lengths, found.bounds};
  for (int i = 0; i < 6; ++i) Py_XDECREF(owned[i]);
  return record;
}

// read(buffer, sequence | None) -> Record | None
PyObject *asyncrl_read(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "read: 2 arguments expected, found %zd", count);
  // A view of our own: a released one is refused here, and nobody else can release this one.
  PyObject *view = PyMemoryView_FromObject(given[0]);
  PyObject *record = view ? asyncrl_read_view(view, given[1]) : NULL;
  Py_XDECREF(view);
  return record;
}

// -- rows -------------------------------------------------------------------------------------------------------------

// Part `i` of the jagged `array`: bytes of its own with `copy`, else a view.
static PyObject *piece(PyArrayObject *array, npy_intp start, npy_intp end, int copy) {
  npy_intp length = end - start, item = PyArray_ITEMSIZE(array);
  char *data = PyArray_BYTES(array) + start * item;
  if (!copy) {
    int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | (PyArray_FLAGS(array) & (NPY_ARRAY_WRITEABLE | NPY_ARRAY_ALIGNED));
    return view_of(PyArray_DESCR(array), 1, &length, data, flags, (PyObject *)array);
  }
  Py_INCREF(PyArray_DESCR(array));
  PyObject *own = PyArray_NewFromDescr(&PyArray_Type, PyArray_DESCR(array), 1, &length, NULL, NULL, 0, NULL);
  if (own) memcpy(PyArray_DATA((PyArrayObject *)own), data, length * item);
  return own;
}

static int fill_from_list(const Shape *shape, PyObject *rows, Py_ssize_t place, PyObject *column) {
  Py_ssize_t n = PyList_GET_SIZE(rows);
  if (PyList_GET_SIZE(column) != n) {
    PyErr_Format(PyExc_ValueError, "%zd rows, but column %zd has %zd", n, place, PyList_GET_SIZE(column));
    return 0;
  }
  for (Py_ssize_t i = 0; i < n; ++i)
    *field_of(shape, PyList_GET_ITEM(rows, i), place) = Py_NewRef(PyList_GET_ITEM(column, i));
  return 1;
}

// `dict`: an empty one for each; anything else: the same for all.
static int fill_with(const Shape *shape, PyObject *rows, Py_ssize_t place, PyObject *column) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    PyObject *value = column == (PyObject *)&PyDict_Type ? PyDict_New() : Py_NewRef(column);
    if (!value) return 0;
    *field_of(shape, PyList_GET_ITEM(rows, i), place) = value;
  }
  return 1;
}

static int fill_from_array(const Shape *shape, PyObject *rows, Py_ssize_t place, PyArrayObject *array, PyObject *bounds,
                           int copy) {
  int64_t start = 0, end;
  if (PyArray_NDIM(array) != 1 || !PyArray_IS_C_CONTIGUOUS(array) || PyDataType_REFCHK(PyArray_DESCR(array))) {
    PyErr_Format(PyExc_ValueError, "column %zd: one dimension of numbers without gaps is needed", place);
    return 0;
  }
  for (Py_ssize_t i = 0; i <= PyList_GET_SIZE(rows); ++i, start = end) {
    if (!asyncrl_int64(PyTuple_GET_ITEM(bounds, i), &end)) return 0;
    if (end < start || end > PyArray_DIM(array, 0)) {
      PyErr_Format(PyExc_ValueError, "column %zd: bounds %R do not cut %zd values", place, bounds, PyArray_DIM(array, 0));
      return 0;
    }
    if (!i) continue;
    PyObject *part = piece(array, start, end, copy);
    if (!part) return 0;
    *field_of(shape, PyList_GET_ITEM(rows, i - 1), place) = part;
  }
  return 1;
}

// The same column twice: its values are shared.
static int fill_as_before(const Shape *shape, PyObject *rows, Py_ssize_t place) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    PyObject *row = PyList_GET_ITEM(rows, i);
    *field_of(shape, row, place) = Py_NewRef(*field_of(shape, row, place - 1));
  }
  return 1;
}

// whole(cls, rows) -> bool: rows 0 to n - 1 of one group of n, in order, by the first three fields of `cls`: group, row, n. False
// too where they are no plain integers.
PyObject *asyncrl_whole(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "whole: 2 arguments expected, found %zd", count);
  if (!PyList_CheckExact(given[1]) && !PyTuple_CheckExact(given[1])) Py_RETURN_FALSE;
  if ((PyObject *)last_rows.type != given[0] && !asyncrl_learn(&last_rows, given[0], NULL)) return NULL;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(given[1]);
  if (last_rows.count < 3) Py_RETURN_FALSE;
  int64_t expected[3] = {0, 0, n};
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject *row = PySequence_Fast_GET_ITEM(given[1], i);
    if (!Py_IS_TYPE(row, last_rows.type)) Py_RETURN_FALSE;
    for (int place = 0; place < 3; ++place) {
      PyObject *number = *field_of(&last_rows, row, place);
      int overflow = 1;
      int64_t value = number && PyLong_CheckExact(number) ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
      if (!place && !i && !overflow) expected[0] = value;
      if (overflow || value != (place == 1 ? i : expected[place])) Py_RETURN_FALSE;
    }
  }
  return PyBool_FromLong(n > 0);
}

// rows(cls, bounds, columns, copy) -> [cls], as quick.py says. Errors: ValueError, TypeError.
PyObject *asyncrl_rows(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 4 || !PyTuple_CheckExact(given[1]) || !PyTuple_CheckExact(given[2]) || PyTuple_GET_SIZE(given[1]) < 1)
    return PyErr_Format(PyExc_TypeError, "rows: a class, n + 1 bounds, columns and `copy` expected");
  PyObject *bounds = given[1], *columns = given[2];
  int copy = PyObject_IsTrue(given[3]);
  if (copy < 0 || ((PyObject *)last_rows.type != given[0] && !asyncrl_learn(&last_rows, given[0], NULL))) return NULL;
  const Shape shape = last_rows;  // a collection in between may run what asks for rows of another class
  Py_ssize_t n = PyTuple_GET_SIZE(bounds) - 1;
  if (PyTuple_GET_SIZE(columns) != shape.count)
    return PyErr_Format(PyExc_ValueError, "%R: %zd columns expected", given[0], shape.count);
  PyObject *rows = PyList_New(n);
  for (Py_ssize_t i = 0; rows && i < n; ++i) {
    PyObject *row = shape.type->tp_alloc(shape.type, 0);
    if (row)
      PyList_SET_ITEM(rows, i, row);
    else
      Py_CLEAR(rows);
  }
  for (Py_ssize_t i = 0; rows && i < shape.count; ++i) {
    PyObject *column = PyTuple_GET_ITEM(columns, i);
    int good = 0;
    if (i && column == PyTuple_GET_ITEM(columns, i - 1) && column != (PyObject *)&PyDict_Type)
      good = fill_as_before(&shape, rows, i);
    else if (PyList_CheckExact(column))
      good = fill_from_list(&shape, rows, i, column);
    else if (PyArray_CheckExact(column))
      good = fill_from_array(&shape, rows, i, (PyArrayObject *)column, bounds, copy);
    else
      good = fill_with(&shape, rows, i, column);
    if (!good) Py_CLEAR(rows);
  }
  return rows;
}
