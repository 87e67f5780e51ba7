// Windows of images whose channels lie side by side: of convolutions and pooling.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace windows {

struct Window {
  int64_t image_height, image_width, channels, out_height, out_width;
  int64_t height, width, stride_y, stride_x, top, left, dilation_y, dilation_x;

  int64_t elements(int64_t images) const { return images * image_height * image_width * channels; }
};

// The part of a window along one axis that is inside the image.
struct Inside {
  int64_t first, end;

  Inside(int64_t start, int64_t dilation, int64_t size, int64_t image)
      : first(start < 0 ? std::min(size, (-start + dilation - 1) / dilation) : 0),
        end(std::max(first, std::min(size, start < image ? (image - start + dilation - 1) / dilation : 0))) {}
};

// The attribute of an operator: height, width, strides, padding at the top, left, bottom and right, and dilations.
struct Sizes {
  int64_t of[10] = {};

  ort::Status* read(const ort::Info* info) {
    size_t count = std::size(of);
    auto get = ort::call<ort::Status*(const ort::Info*, const char*, int64_t*, size_t*)>(ort::kInfoInts);
    if (auto s = get(info, "window", of, &count)) return s;
    const auto positive = [this](int i) { return of[i] > 0; };
    const bool valid = count == std::size(of) && positive(0) && positive(1) && positive(2) && positive(3) &&
                       positive(8) && positive(9) && std::all_of(of + 4, of + 8, [](auto p) { return p >= 0; });
    return valid ? nullptr : ort::failure("an operator over images has an invalid window");
  }

  // Finds the windows of images with channels last, or of series, which are images of one row; false, if they are smaller
  // than one.
  bool place(const ort::Tensor& x, Window& w) const {
    if (x.rank != 4 && x.rank != 3) return false;
    w = {x.rank == 4 ? x.dims[1] : 1, x.dims[x.rank - 2], x.dims[x.rank - 1], 0, 0, of[0], of[1], of[2], of[3], of[4], of[5], of[8], of[9]};
    const int64_t free_height = w.image_height + w.top + of[6] - (w.height - 1) * w.dilation_y - 1;
    const int64_t free_width = w.image_width + w.left + of[7] - (w.width - 1) * w.dilation_x - 1;
    if (free_height < 0 || free_width < 0) return false;
    w.out_height = free_height / w.stride_y + 1;
    w.out_width = free_width / w.stride_x + 1;
    return x.rank == 4 || w.out_height == 1;
  }
};

}  // namespace windows
