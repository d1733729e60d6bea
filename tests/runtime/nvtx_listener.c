/* A profiler as NVTX sees one: loaded through NVTX_INJECTION64_PATH, it writes every range of every domain into a file.
 *
 *     domain <name> | start <id> <message> | end <id>
 *
 * The few declarations of NVTX 3 that it needs are repeated here (nvtx3/nvtxDetail/nvtxTypes.h), so that it compiles anywhere. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef struct {
  size_t struct_size;
  int (*module_table)(int module, Function*** table, unsigned* size);
} Callbacks;
typedef const void* (*Export)(uint32_t table);
typedef struct {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message; /* what `register_string` gave out */
} Attributes;

enum { CALLBACKS = 1, CORE2 = 5, START = 2, END = 3, REGISTER = 10, CREATE = 12 };

static FILE* out;
static uint64_t next_id;

static void* create(const char* name) {
  fprintf(out, "domain %s\n", name);
  return strdup(name);
}
static void* register_string(void* domain, const char* text) {
  (void)domain;
  return strdup(text);
}
static uint64_t start(void* domain, const Attributes* attributes) {
  uint64_t id = __atomic_add_fetch(&next_id, 1, __ATOMIC_SEQ_CST);
  fprintf(out, "start %llu %s/%s\n", (unsigned long long)id, (const char*)domain, attributes->message);
  return id;
}
static void end(void* domain, uint64_t id) {
  (void)domain;
  fprintf(out, "end %llu\n", (unsigned long long)id);
}

int InitializeInjectionNvtx2(Export get) {
  const Callbacks* callbacks = get(CALLBACKS);
  Function** table;
  unsigned size;
  out = fopen(getenv("NVTX_LISTENER_LOG"), "a");
  if (out == NULL || callbacks == NULL || !callbacks->module_table(CORE2, &table, &size) || size <= CREATE) return 0;
  setvbuf(out, NULL, _IOLBF, 0);
  *table[CREATE] = (Function)create;
  *table[REGISTER] = (Function)register_string;
  *table[START] = (Function)start;
  *table[END] = (Function)end;
  return 1;
}
