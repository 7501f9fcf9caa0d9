// Read the golden calls of a bundle, and compare outputs with them.
//
// golden.safetensors is 8 bytes with the length of a JSON header, the header, and the bytes of all tensors. A tensor is
// named CALL/input/NAME or CALL/output/NAME.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

struct Tensor {
    std::string dtype;  // as in safetensors: F32, I64, …
    std::vector<int64_t> shape;
    std::vector<char> bytes;
};

struct Call {
    std::map<std::string, Tensor> inputs, outputs;
};

inline std::map<std::string, Call> read_golden(const std::string& bundle) {
    std::ifstream file(bundle + "/golden.safetensors", std::ios::binary | std::ios::ate);
    const uint64_t size = file ? uint64_t(file.tellg()) : 0;
    uint64_t length = 0;
    file.seekg(0);
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    if (!file || length > (64 << 20) || 8 + length > size) throw std::runtime_error(bundle + " has no readable golden.safetensors");
    std::string header(length, ' ');
    file.read(header.data(), length);
    static const std::regex entry(R"re("([^"/]+)/(input|output)/([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],)re"
                                  R"re("data_offsets":\[(\d+),(\d+)\]\})re");
    std::map<std::string, Call> calls;
    for (std::sregex_iterator found(header.begin(), header.end(), entry), end; found != end; ++found) {
        Call& call = calls[(*found)[1]];
        Tensor& tensor = ((*found)[2] == "input" ? call.inputs : call.outputs)[(*found)[3]];
        tensor.dtype = (*found)[4];
        static const std::regex number("\\d+");
        const std::string sizes = (*found)[5];
        for (std::sregex_iterator size(sizes.begin(), sizes.end(), number); size != end; ++size)
            tensor.shape.push_back(std::stoll(size->str()));
        const uint64_t first = std::stoull((*found)[6]), last = std::stoull((*found)[7]);
        if (first > last || last > size - 8 - length) throw std::runtime_error(bundle + "/golden.safetensors is damaged");
        tensor.bytes.resize(last - first);
        file.seekg(8 + length + first);
        file.read(tensor.bytes.data(), last - first);
    }
    if (calls.empty() || !file) throw std::runtime_error(bundle + "/golden.safetensors is damaged");
    return calls;
}

// The largest error of a float32 output, as a share of its largest value; for other dtypes 0 if all bytes are equal.
inline double error_of(const void* data, const Tensor& golden) {
    if (golden.dtype != "F32") return std::memcmp(data, golden.bytes.data(), golden.bytes.size()) == 0 ? 0 : INFINITY;
    const auto* got = static_cast<const float*>(data);
    const auto* wanted = reinterpret_cast<const float*>(golden.bytes.data());
    double error = 0, scale = 0;
    for (size_t i = 0; i < golden.bytes.size() / sizeof(float); ++i) {
        // NaN counts as the largest error: no comparison with it is true.
        const double difference = std::abs(got[i] - wanted[i]);
        error = difference <= error ? error : std::isnan(difference) ? INFINITY : difference;
        scale = std::max(scale, double(std::abs(wanted[i])));
    }
    return scale > 0 ? error / scale : error;
}

// Print the error of an output, and return whether it is small enough.
inline bool report(const std::string& call, const std::string& output, double error) {
    std::printf("%s %s: largest error %.1e of its largest value\n", call.c_str(), output.c_str(), error);
    return error <= 1e-3;
}
