/* A small tensor runtime with the functions that libraries of onnx-mlir export, the arithmetic that the stand-in
   compiler emits calls of, and counters of what is alive. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  void *data;
  int64_t *shape, *strides, rank, owning;
  int type;
} OMTensor;

typedef struct {
  OMTensor **tensors;
  int64_t size;
} OMTensorList;

int64_t standin_tensors, standin_lists, standin_blocks, standin_runs;
volatile int standin_go;

#define COUNT(what, by) __atomic_add_fetch(&what, by, __ATOMIC_SEQ_CST)

static const int64_t sizes[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8, 0, 0, 2}; /* by ONNX's numbers of types */

int64_t omTensorGetNumElems(const OMTensor *t) {
  int64_t n = 1;
  for (int64_t i = 0; i < t->rank; i++) n *= t->shape[i];
  return n;
}

OMTensor *omTensorCreateWithOwnership(void *data, const int64_t *shape, int64_t rank, int type, int64_t owning) {
  OMTensor *t = malloc(sizeof *t);
  *t = (OMTensor){data, malloc(8 * rank + 1), malloc(8 * rank + 1), rank, owning, type};
  int64_t step = 1;
  for (int64_t i = rank - 1; i >= 0; i--) {
    t->shape[i] = shape[i];
    t->strides[i] = step;
    step *= shape[i];
  }
  COUNT(standin_tensors, 1);
  return t;
}

OMTensor *omTensorCreate(void *data, const int64_t *shape, int64_t rank, int type) {
  return omTensorCreateWithOwnership(data, shape, rank, type, 0);
}

OMTensor *omTensorCreateEmpty(const int64_t *shape, int64_t rank, int type) {
  OMTensor *t = omTensorCreateWithOwnership(NULL, shape, rank, type, 1);
  t->data = malloc(omTensorGetNumElems(t) * sizes[type] + 1);
  COUNT(standin_blocks, 1);
  return t;
}

void omTensorDestroy(OMTensor *t) {
  if (!t) return;
  if (t->owning) {
    free(t->data);
    COUNT(standin_blocks, -1);
  }
  free(t->shape);
  free(t->strides);
  free(t);
  COUNT(standin_tensors, -1);
}

void *omTensorGetDataPtr(const OMTensor *t) { return t->data; }
const int64_t *omTensorGetShape(const OMTensor *t) { return t->shape; }
const int64_t *omTensorGetStrides(const OMTensor *t) { return t->strides; }
int64_t omTensorGetRank(const OMTensor *t) { return t->rank; }
int omTensorGetDataType(const OMTensor *t) { return t->type; }
int64_t omTensorGetOwning(const OMTensor *t) { return t->owning; }
void omTensorSetOwning(OMTensor *t, int64_t owning) { t->owning = owning; }

OMTensorList *omTensorListCreate(OMTensor **tensors, int64_t n) {
  OMTensorList *list = malloc(sizeof *list);
  list->size = n;
  list->tensors = malloc(n * sizeof *tensors + 1);
  memcpy(list->tensors, tensors, n * sizeof *tensors);
  COUNT(standin_lists, 1);
  return list;
}

void omTensorListDestroyShallow(OMTensorList *list) {
  if (!list) return;
  free(list->tensors);
  free(list);
  COUNT(standin_lists, -1);
}

void omTensorListDestroy(OMTensorList *list) {
  if (!list) return;
  for (int64_t i = 0; i < list->size; i++) omTensorDestroy(list->tensors[i]);
  omTensorListDestroyShallow(list);
}

int64_t omTensorListGetSize(OMTensorList *list) { return list->size; }
OMTensor *omTensorListGetOmtByIndex(OMTensorList *list, int64_t i) { return list->tensors[i]; }

/* The file of constants, mapped once. */
static int map_constants(void **address, const char *name, int64_t size) {
  if (*address) return 1;
  char path[4096];
  const char *folder = getenv("OM_CONSTANT_PATH");
  snprintf(path, sizeof path, "%s/%s", folder ? folder : ".", name);
  int file = open(path, O_RDONLY);
  if (file < 0) {
    fprintf(stderr, "cannot open %s\n", path);
    return 0;
  }
  void *mapped = mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return 0;
  *address = mapped;
  return 1;
}

/* Waits until another thread has written to standin_go; gives up after some minutes. */
static int wait_for_go(void) {
  for (int i = 0; i < 60000 && !standin_go; i++) nanosleep(&(struct timespec){0, 5000000}, NULL);
  return standin_go;
}

/* Arithmetic */

static OMTensor *constant(void *data, const int64_t *shape, int64_t rank, int type) {
  return omTensorCreate(data, shape, rank, type);
}

static OMTensor *copy(const OMTensor *x, const int64_t *shape, int64_t rank) {
  OMTensor *y = omTensorCreateEmpty(shape, rank, x->type);
  memcpy(y->data, x->data, omTensorGetNumElems(x) * sizes[x->type]);
  return y;
}

static OMTensor *reshape(const OMTensor *x, const int64_t *wanted, int64_t rank) {
  int64_t shape[16], rest = omTensorGetNumElems(x), open = -1;
  for (int64_t i = 0; i < rank; i++) {
    shape[i] = wanted[i] == 0 ? x->shape[i] : wanted[i];
    if (shape[i] < 0) open = i;
    else if (shape[i]) rest /= shape[i];
  }
  if (open >= 0) shape[open] = rest;
  return copy(x, shape, rank);
}

static int64_t size_at(const OMTensor *x, int64_t rank, int64_t axis) {
  int64_t i = axis - (rank - x->rank);
  return i < 0 ? 1 : x->shape[i];
}

static int64_t broadcast(const OMTensor *a, const OMTensor *b, int64_t *shape) {
  int64_t rank = a->rank > b->rank ? a->rank : b->rank;
  for (int64_t i = 0; i < rank; i++) {
    int64_t n = size_at(a, rank, i), m = size_at(b, rank, i);
    shape[i] = n == 1 ? m : n;
  }
  return rank;
}

static int64_t place(const OMTensor *x, const int64_t *shape, int64_t rank, int64_t flat) {
  int64_t at = 0;
  for (int64_t i = rank - 1; i >= 0; i--) {
    int64_t index = flat % shape[i], own = i - (rank - x->rank);
    flat /= shape[i];
    if (own >= 0 && x->shape[own] > 1) at += index * x->strides[own];
  }
  return at;
}

static OMTensor *binary(const OMTensor *a, const OMTensor *b, char operation) {
  int64_t shape[16], rank = broadcast(a, b, shape);
  OMTensor *y = omTensorCreateEmpty(shape, rank, 1);
  for (int64_t i = 0, n = omTensorGetNumElems(y); i < n; i++) {
    float p = ((float *)a->data)[place(a, shape, rank, i)], q = ((float *)b->data)[place(b, shape, rank, i)];
    ((float *)y->data)[i] = operation == '+' ? p + q : operation == '-' ? p - q : operation == '*' ? p * q : p / q;
  }
  return y;
}

static OMTensor *unary(const OMTensor *x, char operation) {
  OMTensor *y = omTensorCreateEmpty(x->shape, x->rank, 1);
  for (int64_t i = 0, n = omTensorGetNumElems(y); i < n; i++) {
    float v = ((float *)x->data)[i];
    ((float *)y->data)[i] = operation == 'r' ? (v > 0 ? v : v == v ? 0 : v) : operation == 's' ? 1 / (1 + expf(-v)) : tanhf(v);
  }
  return y;
}

static void product(float *y, const float *a, const float *b, int64_t n, int64_t m, int64_t k, int ta, int tb, float by) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < m; j++) {
      double sum = 0;
      for (int64_t l = 0; l < k; l++) sum += (double)a[ta ? l * n + i : i * k + l] * b[tb ? j * k + l : l * m + j];
      y[i * m + j] = by * sum;
    }
}

static OMTensor *matmul(const OMTensor *a, const OMTensor *b) {
  int64_t n = a->shape[a->rank - 2], k = a->shape[a->rank - 1], m = b->shape[b->rank - 1], shape[16];
  OMTensor heads_a = *a, heads_b = *b; /* of the batch dimensions */
  heads_a.rank -= 2, heads_b.rank -= 2;
  int64_t rank = broadcast(&heads_a, &heads_b, shape), batch = 1;
  for (int64_t i = 0; i < rank; i++) batch *= shape[i];
  shape[rank] = n, shape[rank + 1] = m;
  OMTensor *y = omTensorCreateEmpty(shape, rank + 2, 1);
  for (int64_t i = 0; i < batch; i++) {
    const float *p = (float *)a->data + place(&heads_a, shape, rank, i);
    const float *q = (float *)b->data + place(&heads_b, shape, rank, i);
    product((float *)y->data + i * n * m, p, q, n, m, k, 0, 0, 1);
  }
  return y;
}

static OMTensor *gemm(const OMTensor *a, const OMTensor *b, const OMTensor *c, float alpha, float beta, int ta, int tb) {
  int64_t n = a->shape[ta], k = a->shape[!ta], m = b->shape[!tb], shape[] = {n, m};
  OMTensor *y = omTensorCreateEmpty(shape, 2, 1);
  product(y->data, a->data, b->data, n, m, k, ta, tb, alpha);
  if (c)
    for (int64_t i = 0; i < n * m; i++) ((float *)y->data)[i] += beta * ((float *)c->data)[place(c, shape, 2, i)];
  return y;
}
