//go:build cgo

// A model file that is no file: the library reads it through stdio, stdio from Go.
#define _GNU_SOURCE
#include "image.h"

#include <stdlib.h>
#include <string.h>

// Exported by Go: the bytes read, 0 at the end, -1 on an error. A hole is left as it is.
extern int64_t kvImageRead(uintptr_t image, char * dst, int64_t n, int64_t off);

#ifdef __GLIBC__
#include <stdio.h>

struct cursor {
    uintptr_t image;
    int64_t   size, at;
};

static ssize_t cursor_read(void * data, char * dst, size_t n) {
    struct cursor * c   = data;
    const int64_t   got = kvImageRead(c->image, dst, (int64_t) n, c->at);
    if (got > 0) {
        c->at += got;
    }
    return got;
}

static int cursor_seek(void * data, off64_t * off, int whence) {
    struct cursor * c  = data;
    const int64_t   to = *off + (whence == SEEK_CUR ? c->at : whence == SEEK_END ? c->size : 0);
    if (to < 0 || to > c->size) {
        return -1;
    }
    c->at = *off = to;
    return 0;
}

struct llama_model * kv_load_image(uintptr_t image, int64_t size, struct llama_model_params params) {
    struct cursor               cursor = { .image = image, .size = size };
    const cookie_io_functions_t io     = { .read = cursor_read, .seek = cursor_seek };
    // without a buffer of its own, stdio would ask for 8 KiB at a time
    const size_t buffer_size = 1 << 20;
    char *       buffer      = malloc(buffer_size);
    FILE *       file        = fopencookie(&cursor, "rb", io);
    struct llama_model * model = NULL;
    if (file && buffer && setvbuf(file, buffer, _IOFBF, buffer_size) == 0) {
        model = llama_model_load_from_file_ptr(file, params);
    }
    if (file) {
        fclose(file);
    }
    free(buffer);
    return model;
}

bool kv_has_images(void) {
    return true;
}
#else
struct llama_model * kv_load_image(uintptr_t image, int64_t size, struct llama_model_params params) {
    (void) image; (void) size; (void) params;
    return NULL;
}

bool kv_has_images(void) {
    return false;
}
#endif
