// plan() and Plan.write() of write.py.

#include "native.h"

#include <time.h>

enum { D_GROUP, D_MEMBERS, D_GROUP_SIZE, D_SECTIONS, D_EPOCH, D_VERSION, D_PRODUCER };  // fields of Draft
enum { P_DRAFT, P_TOKENS, P_PARTS, P_SIZE };                                            // fields of Plan
enum { UNLOCKED = 1 << 16 };  // bytes from which a copy lets other threads run

static Shape plan_shape, draft_shape;
static PyObject *python_rows, *python_row_bytes, *flat, *own_sections[2];

// set_plan(Plan, Draft, rows, row_bytes): the classes, and the Python for parts of other axes.
PyObject *asyncrl_set_plan(PyObject *self, PyObject *arguments) {
  PyObject *plan, *draft, *rows, *row_bytes;
  if (!PyArg_ParseTuple(arguments, "OOOO", &plan, &draft, &rows, &row_bytes)) return NULL;
  if (!asyncrl_learn(&plan_shape, plan, "draft tokens parts size") ||
      !asyncrl_learn(&draft_shape, draft, "group members group_size sections epoch policy_version producer"))
    return NULL;
  Py_XSETREF(python_rows, Py_NewRef(rows));
  Py_XSETREF(python_row_bytes, Py_NewRef(row_bytes));
  Py_XSETREF(flat, Py_BuildValue("(ii)", 1, 1));
  for (int i = 0; i < 2; ++i) Py_XSETREF(own_sections[i], PyLong_FromLong(i ? S_MEMBERS : S_LENGTHS));
  if (!flat || !own_sections[0] || !own_sections[1]) return NULL;
  Py_RETURN_NONE;
}

// [n] int32 of distinct numbers below the group size. NULL without an error: unusual.
static PyObject *members_of(PyObject *given, int64_t group_size) {
  int overflow, known = PyList_CheckExact(given) || PyTuple_CheckExact(given) || PyRange_Check(given);
  PyObject *fast = known ? PySequence_Fast(given, "members") : NULL;
  Py_ssize_t n = fast ? PySequence_Fast_GET_SIZE(fast) : 0;
  PyObject *packed = n > 0 && n <= MEMBERS ? PyBytes_FromStringAndSize(NULL, 4 * n) : NULL;
  uint64_t seen[MEMBERS / 64] = {0};
  for (Py_ssize_t i = 0; packed && i < n; ++i) {
    PyObject *item = PySequence_Fast_GET_ITEM(fast, i);
    int64_t member = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
    if (member < 0 || member >= group_size || member >= MEMBERS || seen[member / 64] >> (member % 64) & 1) {
      Py_CLEAR(packed);
      break;
    }
    seen[member / 64] |= (uint64_t)1 << (member % 64);
    ((int32_t *)PyBytes_AS_STRING(packed))[i] = (int32_t)member;
  }
  Py_XDECREF(fast);
  return packed;
}

// `data` is a list or tuple of `n` plain arrays [length] of `type`: 1. With `fill` the lengths are taken from them.
static int jagged(PyObject *data, Py_ssize_t n, int type, int32_t *lengths, int fill) {
  if (!PyList_CheckExact(data) && !PyTuple_CheckExact(data)) return 0;
  if (PySequence_Fast_GET_SIZE(data) != n) return 0;
  PyObject **items = PySequence_Fast_ITEMS(data);
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (!plain(items[i], type) || PyArray_NDIM((PyArrayObject *)items[i]) != 1) return 0;
    npy_intp length = PyArray_DIM((PyArrayObject *)items[i], 0);
    if (length > INT32_MAX || (!fill && length != lengths[i])) return 0;
    lengths[i] = (int32_t)length;
  }
  return 1;
}

static PyObject *part_of(PyObject *section, PyObject *spec, int code, PyObject *data, Py_ssize_t bytes) {
  PyObject *size = PyLong_FromSsize_t(bytes);
  PyObject *part = size ? PyTuple_Pack(6, section, spec, asyncrl_dtypes[code], data, flat, size) : NULL;
  Py_XDECREF(size);
  return part;
}

// The part of a section that was given. NULL without an error: unusual.
static PyObject *given_part(PyObject *key, PyObject *data, Py_ssize_t n, int32_t *lengths, int64_t tokens) {
  int overflow;
  long section = PyLong_Check(key) ? PyLong_AsLongAndOverflow(key, &overflow) : -1;
  const Form *form = form_of(section);
  if (form ? section <= S_MEMBERS : section < USER || section >= USER_END) return NULL;
  if (!form || form->axis == BYTES) {
    if (!PyBytes_CheckExact(data)) return NULL;
    PyObject *spec = form ? form->spec : asyncrl_forms[0].spec;
    return part_of(key, spec, 1, data, PyBytes_GET_SIZE(data));
  }
  if (form->axis == TOKENS) {
    PyArray_Descr *dtype = asyncrl_dtypes[form->code];
    if (form->inner || !jagged(data, n, dtype->type_num, lengths, 0)) return NULL;
    return part_of(key, form->spec, form->code, data, tokens * PyDataType_ELSIZE(dtype));
  }
  PyObject *way = form->axis == ROWS ? python_rows : python_row_bytes;
  PyObject *part = PyObject_CallFunction(way, "OOOn", key, form->spec, data, n);  // holds its arguments
  if (part && (!PyTuple_CheckExact(part) || PyTuple_GET_SIZE(part) != 6)) Py_CLEAR(part);
  return part;
}

// The parts of all sections, and their size with the header. NULL without an error: unusual.
static PyObject *parts_of(PyObject *members, PyObject *sections, int64_t *tokens, int64_t *size) {
  Py_ssize_t n = PyBytes_GET_SIZE(members) / 4, place = 0, count = PyDict_GET_SIZE(sections) + 2;
  PyObject *number = PyLong_FromLong(S_TOKENS), *key, *data;
  PyObject *ids = number ? PyDict_GetItemWithError(sections, number) : NULL;
  PyObject *lengths = ids ? PyBytes_FromStringAndSize(NULL, 4 * n) : NULL, *parts = NULL;
  Py_XDECREF(number);
  int32_t *each = lengths ? (int32_t *)PyBytes_AS_STRING(lengths) : NULL;
  int good = lengths && jagged(ids, n, asyncrl_dtypes[asyncrl_forms[S_TOKENS].code]->type_num, each, 1);
  *tokens = 0;
  for (Py_ssize_t i = 0; good && i < n; ++i) *tokens += each[i];
  *size = (int64_t)aligned(sizeof(Header) + sizeof(Entry) * count);
  good = good && count <= PARTS && (parts = PyList_New(count));
  for (Py_ssize_t i = 0; good && i < count; ++i) {
    PyObject *part, *own = i ? members : lengths;
    if (i < 2)
      part = part_of(own_sections[i], asyncrl_forms[S_LENGTHS + i].spec, asyncrl_forms[S_LENGTHS + i].code, own, 4 * n);
    else if (PyDict_Next(sections, &place, &key, &data)) {  // borrowed: a collection may run what changes the dictionary
      Py_INCREF(key), Py_INCREF(data);
      part = given_part(key, data, n, each, *tokens);
      Py_DECREF(key), Py_DECREF(data);
    } else
      part = NULL;
    int64_t bytes;
    good = part && asyncrl_int64(PyTuple_GET_ITEM(part, 5), &bytes);
    if (good) *size += (int64_t)aligned(bytes);
    if (part) PyList_SET_ITEM(parts, i, part);
  }
  Py_XDECREF(lengths);
  if (!good) Py_CLEAR(parts);
  return parts;
}

// plan(draft) -> Plan | None. Errors: those of the Python for parts of other axes.
PyObject *asyncrl_plan(PyObject *self, PyObject *draft) {
  int64_t group_size, version, tokens, size;
  if (!Py_IS_TYPE(draft, draft_shape.type)) Py_RETURN_NONE;
  PyObject *given = *field_of(&draft_shape, draft, D_MEMBERS), *sections = *field_of(&draft_shape, draft, D_SECTIONS);
  PyObject *producer = *field_of(&draft_shape, draft, D_PRODUCER);
  if (!given || !sections || !PyDict_CheckExact(sections)) Py_RETURN_NONE;
  if (!producer || !PyBytes_CheckExact(producer) || PyBytes_GET_SIZE(producer) != 16) Py_RETURN_NONE;
  if (!asyncrl_int64(*field_of(&draft_shape, draft, D_GROUP_SIZE), &group_size) ||
      !asyncrl_int64(*field_of(&draft_shape, draft, D_VERSION), &version))
    return asyncrl_unusual();
  if (version < -1 || version > INT32_MAX) Py_RETURN_NONE;
  PyObject *members = members_of(given, group_size);
  PyObject *parts = members ? parts_of(members, sections, &tokens, &size) : NULL;
  Py_XDECREF(members);
  if (!parts && PyErr_Occurred()) return NULL;  // of the Python for a part: it says what is wrong
  if (!parts) Py_RETURN_NONE;
  PyObject *plan = plan_shape.type->tp_alloc(plan_shape.type, 0);
  if (plan) {
    *field_of(&plan_shape, plan, P_DRAFT) = Py_NewRef(draft);
    *field_of(&plan_shape, plan, P_PARTS) = Py_NewRef(parts);
    *field_of(&plan_shape, plan, P_TOKENS) = PyLong_FromLongLong(tokens);
    *field_of(&plan_shape, plan, P_SIZE) = PyLong_FromLongLong(size);
    if (PyErr_Occurred()) Py_CLEAR(plan);
  }
  Py_DECREF(parts);
  return plan;
}

// -- writing ----------------------------------------------------------------------------------------------------------

typedef struct {
  PyObject *owner;  // held while other threads run
  const char *from;
  size_t bytes;
} Piece;

typedef struct {
  char *into;
  uint64_t size, end;  // `end` of what was placed
  uint32_t count;
  Entry entries[PARTS];
  Piece *pieces;
  Py_ssize_t last[PARTS], used, room;  // `last`: behind the pieces of a part
} Layout;

static int add_piece(Layout *layout, PyObject *owner, const void *from, size_t bytes) {
  if (layout->used == layout->room) {
    Py_ssize_t room = 2 * layout->room + 96;
    Piece *more = PyMem_Realloc(layout->pieces, room * sizeof(Piece));
    if (!more) return 0;
    layout->pieces = more;
    layout->room = room;
  }
  layout->pieces[layout->used++] = (Piece){Py_NewRef(owner), from, bytes};
  return 1;
}

static int code_of(PyObject *dtype) {
  if (!PyArray_DescrCheck(dtype) || !PyArray_ISNBO(((PyArray_Descr *)dtype)->byteorder)) return 0;
  for (int code = 1; code < CODES; ++code)
    if (asyncrl_dtypes[code]->type_num == ((PyArray_Descr *)dtype)->type_num) return code;
  return 0;
}

// Place one part. The arrays are looked at again: since the plan somebody may have changed the list. 0: unusual.
static int place(Layout *layout, PyObject *part) {
  int64_t section, bytes, inner[2];
  if (!PyTuple_CheckExact(part) || PyTuple_GET_SIZE(part) != 6) return 0;
  PyObject *data = PyTuple_GET_ITEM(part, 3), *dims = PyTuple_GET_ITEM(part, 4);
  int code = code_of(PyTuple_GET_ITEM(part, 2));
  if (!code || !PyTuple_CheckExact(dims) || PyTuple_GET_SIZE(dims) != 2) return 0;
  if (!asyncrl_int64(PyTuple_GET_ITEM(part, 0), &section) || !asyncrl_int64(PyTuple_GET_ITEM(part, 5), &bytes) ||
      !asyncrl_int64(PyTuple_GET_ITEM(dims, 0), &inner[0]) || !asyncrl_int64(PyTuple_GET_ITEM(dims, 1), &inner[1]))
    return 0;
  const Form *form = form_of(section);
  if ((!form && (section < USER || section >= USER_END)) || (inner[0] | inner[1]) >> 32 || bytes < 0) return 0;
  int64_t found = 0;
  if (PyBytes_CheckExact(data)) {
    found = PyBytes_GET_SIZE(data);
    if (!add_piece(layout, data, PyBytes_AS_STRING(data), found)) return 0;
  } else if (form && (PyList_CheckExact(data) || PyTuple_CheckExact(data))) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(data); ++i) {
      PyObject *array = PySequence_Fast_GET_ITEM(data, i);
      if (!plain(array, asyncrl_dtypes[code]->type_num) || PyArray_NDIM((PyArrayObject *)array) != 1 + form->inner) return 0;
      for (int d = 0; d < form->inner; ++d)
        if (PyArray_DIM((PyArrayObject *)array, 1 + d) != inner[d]) return 0;
      found += PyArray_NBYTES((PyArrayObject *)array);
      if (!add_piece(layout, array, PyArray_DATA((PyArrayObject *)array), PyArray_NBYTES((PyArrayObject *)array))) return 0;
    }
  } else {
    return 0;
  }
  if (found != bytes || bytes > (int64_t)(layout->size - layout->end)) return 0;
  layout->entries[layout->count] = (Entry){
      (uint16_t)section, (uint8_t)code, (uint8_t)(form ? form->axis : BYTES), 0, 0, {inner[0], inner[1]}, layout->end, bytes};
  layout->last[layout->count++] = layout->used;
  layout->end += aligned(bytes);
  return 1;
}

// Copy the sections. With `fault` one by one, and it is called behind each.
static int copy_sections(const Layout *layout, PyObject *fault) {
  Py_ssize_t i = 0;
  PyThreadState *state = fault == Py_None && layout->size >= UNLOCKED ? PyEval_SaveThread() : NULL;
  for (uint32_t part = 0; part < layout->count; ++part) {
    char *to = layout->into + layout->entries[part].offset;
    for (; i < layout->last[part]; to += layout->pieces[i++].bytes)
      if (layout->pieces[i].bytes) memcpy(to, layout->pieces[i].from, layout->pieces[i].bytes);
    if (!state && !asyncrl_hit(fault, "section")) return 0;
  }
  if (state) PyEval_RestoreThread(state);
  return 1;
}

static int header_of(PyObject *plan, Header *header) {
  PyObject *draft = *field_of(&plan_shape, plan, P_DRAFT);
  if (!draft || !Py_IS_TYPE(draft, draft_shape.type)) return 0;
  PyObject *producer = *field_of(&draft_shape, draft, D_PRODUCER), *members = *field_of(&draft_shape, draft, D_MEMBERS);
  int64_t group_size, tokens;
  Py_ssize_t n = members ? PyObject_Size(members) : -1;
  if (n < 0 || !producer || !PyBytes_CheckExact(producer) || PyBytes_GET_SIZE(producer) != 16) return 0;
  if (!asyncrl_int64(*field_of(&draft_shape, draft, D_GROUP_SIZE), &group_size) ||
      !asyncrl_int64(*field_of(&draft_shape, draft, D_EPOCH), &header->epoch) ||
      !asyncrl_int64(*field_of(&draft_shape, draft, D_GROUP), &header->group) ||
      !asyncrl_int64(*field_of(&draft_shape, draft, D_VERSION), &header->policy_version) ||
      !asyncrl_int64(*field_of(&plan_shape, plan, P_TOKENS), &tokens))
    return 0;
  if ((group_size | (int64_t)n) >> 32 || tokens < 0) return 0;
  header->members = (uint32_t)n, header->group_size = (uint32_t)group_size, header->tokens = tokens;
  memcpy(header->producer, PyBytes_AS_STRING(producer), 16);
  return 1;
}

// Payload first, table, header last. 0 with an error set.
static int store(const Layout *layout, Header *header, PyObject *fault) {
  size_t table = layout->count * sizeof(Entry), start = sizeof(Header) + table;
  if (!copy_sections(layout, fault)) return 0;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  header->written_ns = now.tv_sec * 1000000000ull + now.tv_nsec;
  PyObject *head = PyBytes_FromStringAndSize(NULL, start);
  if (!head) return 0;
  memcpy(PyBytes_AS_STRING(head), header, sizeof(Header));
  memcpy(PyBytes_AS_STRING(head) + sizeof(Header), layout->entries, table);
  if (!asyncrl_crc(head, &header->crc)) return 0;
  memcpy(layout->into + sizeof(Header), layout->entries, table);
  if (!asyncrl_hit(fault, "table")) return 0;
  __atomic_thread_fence(__ATOMIC_RELEASE);
  memcpy(layout->into, header, sizeof(Header));
  return asyncrl_hit(fault, "header");
}

static PyObject *write_parts(PyObject *plan, PyObject *parts, char *into, Py_ssize_t room, int64_t sequence, PyObject *fault,
                             uint64_t *written) {
  PyObject *done = NULL;
  int64_t size;
  Py_ssize_t count = PyTuple_GET_SIZE(parts);
  Header header = {MAGIC, VERSION, 1, sizeof(Header), sizeof(Entry), (uint32_t)count};
  if (!asyncrl_int64(*field_of(&plan_shape, plan, P_SIZE), &size) || !header_of(plan, &header) || size < 0 || sequence < 0)
    return asyncrl_unusual();
  Layout layout;
  layout.into = into, layout.size = size, layout.end = aligned(sizeof(Header) + sizeof(Entry) * count);
  layout.count = 0, layout.pieces = NULL, layout.used = layout.room = 0;
  int good = size <= room && layout.end <= layout.size;
  for (Py_ssize_t i = 0; good && i < count; ++i) good = place(&layout, PyTuple_GET_ITEM(parts, i));
  if (good && layout.end == layout.size) {
    header.record_bytes = *written = size, header.sequence = sequence;
    if (store(&layout, &header, fault)) done = Py_NewRef(Py_True);
  } else {
    done = asyncrl_unusual();
  }
  for (Py_ssize_t i = 0; i < layout.used; ++i) Py_DECREF(layout.pieces[i].owner);
  PyMem_Free(layout.pieces);
  return done;
}

// True where the record of `plan` lies at `into`, with its size in `written`; None: unusual.
PyObject *asyncrl_write_into(PyObject *plan, char *into, Py_ssize_t room, int64_t sequence, PyObject *fault, uint64_t *written) {
  if (!Py_IS_TYPE(plan, plan_shape.type)) Py_RETURN_NONE;
  PyObject *parts = *field_of(&plan_shape, plan, P_PARTS);
  if (!parts || !PyList_CheckExact(parts) || PyList_GET_SIZE(parts) > PARTS) Py_RETURN_NONE;
  if (!(parts = PyList_AsTuple(parts))) return NULL;  // ours: what runs in between may change the list
  PyObject *done = write_parts(plan, parts, into, room, sequence, fault, written);
  Py_DECREF(parts);
  return done;
}

// write(plan, buffer, sequence, fault) -> True | None
PyObject *asyncrl_write(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "write: 4 arguments expected, found %zd", count);
  int64_t sequence;
  uint64_t written;
  Py_buffer into;
  if (!asyncrl_int64(given[2], &sequence)) return asyncrl_unusual();
  if (PyObject_GetBuffer(given[1], &into, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) {
    if (!PyErr_ExceptionMatches(PyExc_BufferError)) return NULL;
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  PyObject *done = asyncrl_write_into(given[0], into.buf, into.len, sequence, given[3], &written);
  PyBuffer_Release(&into);
  return done;
}
