// Loading a model whose bytes Go provides.
#ifndef KVASIR_IMAGE_H
#define KVASIR_IMAGE_H

#include "llama.h"

// image is what kvImageRead is asked with. NULL when the model cannot be loaded.
struct llama_model * kv_load_image(uintptr_t image, int64_t size, struct llama_model_params params);

// False where the C library has no such files: then the image is written to a temporary one.
bool kv_has_images(void);

#endif
