// Records in the form that nearly all have: planned, written, read and cut without the interpreter between the columns.
//
// Optional. Where this was not built, the Python beside it runs; and it runs for all that is unusual: a function here that
// meets what it does not know (another dtype, a list in the place of an array, a damaged table, a newer writer) answers
// None and has changed nothing that counts. So each rule and each message stands in Python alone, which is the reference of the tests.
//
// What is won are cache lines, not arithmetic: in a process that slept the caches are cold, and the interpreter between the
// columns costs three times there what it costs in a tight loop.

#define ASYNCRL_MODULE
#include "native.h"

#include <structmember.h>

Form asyncrl_forms[KNOWN];
PyArray_Descr *asyncrl_dtypes[CODES];
PyObject *asyncrl_crc32;

// Where the fields of `type` lie, in the order of its `__slots__`; these are `fields`, where the caller counts on them. 0 with an
// error set.
int asyncrl_learn(Shape *shape, PyObject *type, const char *fields) {
  PyObject *names = PyType_Check(type) ? PyObject_GetAttrString(type, "__slots__") : NULL;
  Shape found = {(PyTypeObject *)type, 0, {0}};
  int good = names && PyTuple_Check(names) && PyTuple_GET_SIZE(names) <= FIELDS;
  while (good && found.count < PyTuple_GET_SIZE(names)) {
    PyObject *member = PyObject_GetAttr(type, PyTuple_GET_ITEM(names, found.count));
    good = member && Py_IS_TYPE(member, &PyMemberDescr_Type);
    if (good) found.offset[found.count++] = ((PyMemberDescrObject *)member)->d_member->offset;
    Py_XDECREF(member);
  }
  if (good && fields) {
    PyObject *space = PyUnicode_FromString(" "), *joined = space ? PyUnicode_Join(space, names) : NULL;
    good = joined && PyUnicode_CompareWithASCIIString(joined, fields) == 0;
    Py_XDECREF(space);
    Py_XDECREF(joined);
  }
  Py_XDECREF(names);
  if (good) {
    Py_INCREF(type);
    Py_XDECREF((PyObject *)shape->type);
    *shape = found;
  } else if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Format(PyExc_TypeError, "a dataclass with at most %d slots is needed (%s), found %R", FIELDS, fields ? fields : "any", type);
  }
  return good;
}

// The answer where a number does not fit or is none; another error stays one.
PyObject *asyncrl_unusual(void) {
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError) && !PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

int asyncrl_int64(PyObject *number, int64_t *value) {
  *value = number ? PyLong_AsLongLong(number) : -1;
  return number && (*value != -1 || !PyErr_Occurred());
}

int asyncrl_hit(PyObject *fault, const char *where) {
  PyObject *found = fault == Py_None ? Py_NewRef(Py_None) : PyObject_CallFunction(fault, "s", where);
  Py_XDECREF(found);
  return found != NULL;
}

int asyncrl_crc(PyObject *stolen, uint32_t *crc) {
  PyObject *found = stolen ? PyObject_CallOneArg(asyncrl_crc32, stolen) : NULL;
  Py_XDECREF(stolen);
  if (!found) return 0;
  *crc = (uint32_t)PyLong_AsUnsignedLong(found);
  Py_DECREF(found);
  return !PyErr_Occurred();
}

// set_forms((dtype by code, ...), ((section, spec, axis, inner, code, codes), ...), zlib.crc32). Section 0: a user's own bytes.
static PyObject *set_forms(PyObject *self, PyObject *arguments) {
  PyObject *kinds, *specs, *crc;
  if (!PyArg_ParseTuple(arguments, "O!O!O", &PyTuple_Type, &kinds, &PyTuple_Type, &specs, &crc)) return NULL;
  for (int code = 1; code < CODES; ++code) {
    PyObject *dtype = PyTuple_GetItem(kinds, code);
    if (!dtype) return NULL;
    if (!PyArray_DescrCheck(dtype)) return PyErr_Format(PyExc_TypeError, "code %d: %R is no dtype", code, dtype);
    asyncrl_dtypes[code] = (PyArray_Descr *)Py_NewRef(dtype);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(specs); ++i) {
    Form form;
    int section;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(specs, i), "iOiiii", &section, &form.spec, &form.axis, &form.inner, &form.code,
                          &form.codes))
      return NULL;
    if (section < 0 || section >= KNOWN || form.code < 1 || form.code >= CODES)
      return PyErr_Format(PyExc_ValueError, "section %d with code %d: rebuild for this layout", section, form.code);
    Py_INCREF(form.spec);
    asyncrl_forms[section] = form;
  }
  asyncrl_crc32 = Py_NewRef(crc);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_forms", set_forms, METH_VARARGS, NULL},
    {"set_plan", asyncrl_set_plan, METH_VARARGS, NULL},
    {"plan", asyncrl_plan, METH_O, NULL},
    {"write", (PyCFunction)(void (*)(void))asyncrl_write, METH_FASTCALL, NULL},
    {"set_record", asyncrl_set_record, METH_O, NULL},
    {"read", (PyCFunction)(void (*)(void))asyncrl_read, METH_FASTCALL, NULL},
    {"rows", (PyCFunction)(void (*)(void))asyncrl_rows, METH_FASTCALL, NULL},
    {"whole", (PyCFunction)(void (*)(void))asyncrl_whole, METH_FASTCALL, NULL},
    {"set_ring", asyncrl_set_ring, METH_VARARGS, NULL},
    {"publish", (PyCFunction)(void (*)(void))asyncrl_publish, METH_FASTCALL, NULL},
    {"take", (PyCFunction)(void (*)(void))asyncrl_take, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
  import_array();
  PyObject *module = PyModule_Create(&definition);
  PyObject *source = module ? PyLong_FromUnsignedLong(ASYNCRL_SOURCE) : NULL;
  if (!source || PyModule_AddObjectRef(module, "SOURCE", source) < 0) Py_CLEAR(module);
  Py_XDECREF(source);
  return module;
}
